// The conversions between f32 and the 16-bit floats, one element at a time: the definition, for the CPU and for CUDA.
//
// Narrowing rounds to nearest even. A NaN stays NaN: quiet, with its sign and its upper payload bits, as
// the F16C instructions do. The functions have no branch, so that they vectorise, and no
// subnormal operand, so that a flush-to-zero mode (torch.set_flush_denormal) does not change the bits.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

inline constexpr uint32_t kF32Abs = 0x7fffffffu;
inline constexpr uint32_t kF32Inf = 0x7f800000u;
inline constexpr uint32_t kF32QuietBit = 0x00400000u;

// Masks instead of ?:, which the compiler may turn back into a branch around the unused operand. A GPU has an
// instruction for it.
BAGUA_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  return no ^ ((no ^ yes) & (0u - static_cast<uint32_t>(condition)));
#endif
}

BAGUA_INLINE float bf16_to_f32(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  return std::bit_cast<float>(bits | select((bits & kF32Abs) > kF32Inf, kF32QuietBit, 0));
}

BAGUA_INLINE uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(select((bits & kF32Abs) > kF32Inf, bits | kF32QuietBit, rounded) >> 16);
}

BAGUA_INLINE float f16_to_f32(uint16_t half) {
  constexpr uint32_t kInf = 0x7c00u << 13;  // f16 infinity with its mantissa at f32's position
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // A subnormal is mantissa * 2^-24: put the mantissa under the exponent of 2^-14 and take 2^-14 away.
  const float subnormal = std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
  uint32_t bits = magnitude + kRebias;
  bits = select(magnitude < (1u << 23), std::bit_cast<uint32_t>(subnormal), bits);
  bits += select(magnitude >= kInf, kRebias, 0);
  bits |= select(magnitude > kInf, kF32QuietBit, 0);
  return std::bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

BAGUA_INLINE uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kF32Abs;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  // Below 2^-14 the addition of 0.5, whose last bit is 2^-24, does the rounding.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t nan = select(magnitude > kF32Inf, 0x0200u | ((magnitude >> 13) & 0x3ffu), 0);
  uint32_t result = select(magnitude < (113u << 23), subnormal, normal);
  result = select(magnitude >= (143u << 23), 0x7c00u | nan, result);  // from 2^16 on
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
}

// One f64 to a float of kMantissa explicit bits, exponent bias kBias and 15 - kMantissa exponent bits.
template <int kMantissa, int kBias>
BAGUA_INLINE uint16_t narrow_f64(double value) {
  constexpr uint64_t kInf = uint64_t{0x7ff} << 52;
  constexpr uint16_t kNarrowInf = 0x7fff >> kMantissa << kMantissa;
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const uint64_t magnitude = bits & ~(uint64_t{1} << 63);
  const uint16_t sign = static_cast<uint16_t>(bits >> 48 & 0x8000u);
  if (magnitude > kInf) {
    const uint64_t payload = (magnitude | uint64_t{1} << 51) >> (52 - kMantissa);
    return static_cast<uint16_t>(sign | kNarrowInf | (payload & ((1u << kMantissa) - 1)));
  }
  // The exponent field the result would have; below 1 it is subnormal and loses that many more bits.
  const int exponent = static_cast<int>(magnitude >> 52) - 1023 + kBias;
  if (exponent > 0x7fff >> kMantissa) return sign | kNarrowInf;
  const int wanted_shift = 52 - kMantissa + (exponent < 1 ? 1 - exponent : 0);
  const int shift = wanted_shift < 54 ? wanted_shift : 54;
  const uint64_t significand = (magnitude & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
  const uint64_t kept = significand >> shift;
  const uint64_t rest = significand & ((uint64_t{1} << shift) - 1);
  const uint64_t half = uint64_t{1} << (shift - 1);
  const uint64_t rounded = kept + (rest > half || (rest == half && (kept & 1)));
  // The leading bit of a normal significand adds one to the exponent field; so does a carry from rounding,
  // which turns the largest finite number into infinity.
  const uint64_t field = exponent >= 1 ? static_cast<uint64_t>(exponent - 1) << kMantissa : 0;
  const uint64_t result = field + rounded;
  return static_cast<uint16_t>(sign | (result < kNarrowInf ? result : kNarrowInf));
}

}  // namespace bagua::kernels

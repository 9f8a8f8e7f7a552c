// The conversions between f32 and the 16-bit floats: the scalar functions are the definition, the array
// functions (half.cc) are what the other CPU kernels call on cache-sized pieces.
//
// Narrowing rounds to nearest even. A NaN stays NaN: quiet, with its sign and its upper payload bits, as
// the F16C instructions do. The scalar functions have no branch, so that they vectorise, and no
// subnormal operand, so that a flush-to-zero mode (torch.set_flush_denormal) does not change the bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {

// An element behind a pointer of any alignment: the byte side of a codec.
using unaligned_u16 = uint16_t __attribute__((aligned(1), may_alias));

// Kernels convert this many elements at a time on the stack: 8 KB of f32, in L1 beside what it came from.
inline constexpr size_t kHalfBlockNumel = 2048;

inline constexpr uint32_t kF32Abs = 0x7fffffffu;
inline constexpr uint32_t kF32Inf = 0x7f800000u;
inline constexpr uint32_t kF32QuietBit = 0x00400000u;

// Masks instead of ?:, which the compiler may turn back into a branch around the unused operand.
BAGUA_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  return no ^ ((no ^ yes) & (0u - static_cast<uint32_t>(condition)));
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

// Source and destination do not overlap; the 16-bit side has any alignment.
void widen_f16(const unaligned_u16* source, float* destination, size_t numel);
void widen_bf16(const unaligned_u16* source, float* destination, size_t numel);
void narrow_f16(const float* source, unaligned_u16* destination, size_t numel);
void narrow_bf16(const float* source, unaligned_u16* destination, size_t numel);

}  // namespace bagua::kernels::cpu

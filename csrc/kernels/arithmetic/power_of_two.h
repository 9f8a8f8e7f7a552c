// Scaling by 2^100 and back, for blocks of tiny numbers (contracts: qsgd.h, minifloat.h), for the CPU and for CUDA.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

// x * s of the contract and back, for blocks whose s is 2^100, by way of the bits: no operation has a subnormal operand
// or result, so a flush-to-zero mode (torch.set_flush_denormal) does not change what comes out.
inline constexpr uint32_t kScaleExponent = 100u << 23;
inline constexpr uint32_t kSmallestNormal = 1u << 23;  // 2^-126

BAGUA_INLINE float scale_up(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & kF32Abs;
  // A subnormal is mantissa * 2^-149: put the mantissa under the exponent of 2^-26 and take 2^-26 away.
  constexpr uint32_t kBase = kSmallestNormal + kScaleExponent;
  const float subnormal = std::bit_cast<float>(magnitude + kBase) - std::bit_cast<float>(kBase);
  const uint32_t scaled =
      select(magnitude < kSmallestNormal, std::bit_cast<uint32_t>(subnormal), magnitude + kScaleExponent);
  return std::bit_cast<float>(scaled | (bits & 0x80000000u));
}

// `value` is 0, or its magnitude above 2^-100.
BAGUA_INLINE float scale_down(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & kF32Abs;
  // Below 2^-26 the addition of 2^-26, whose last bit stands for 2^-149, does the rounding.
  constexpr uint32_t kBase = kSmallestNormal + kScaleExponent;
  const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kBase);
  const uint32_t unscaled = select(magnitude < kBase, std::bit_cast<uint32_t>(sum) - kBase, magnitude - kScaleExponent);
  return std::bit_cast<float>(unscaled | (bits & 0x80000000u));
}

}  // namespace bagua::kernels

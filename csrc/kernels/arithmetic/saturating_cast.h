// Clamping of one element before it is narrowed (contract: saturating_cast.h), for the CPU and for CUDA.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/common/dtype.h"
#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

inline constexpr uint32_t kQuietNan = 0x7fc00000u;  // narrows to 0x7e00 in f16 and 0x7fc0 in bf16

// The bits of the largest finite number of f16 or bf16.
constexpr uint32_t largest_of(DType half) {
  return half == DType::kF16 ? std::bit_cast<uint32_t>(65504.0f) : 0x7f7f0000u;
}

// Clamped to +-largest; NaN where it is not finite.
BAGUA_INLINE float clamp_finite(float value, uint32_t largest) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kF32Abs;
  const uint32_t clamped = (magnitude < largest ? magnitude : largest) | (bits & ~kF32Abs);
  return std::bit_cast<float>(select(magnitude >= kF32Inf, kQuietNan, clamped));
}

BAGUA_INLINE bool is_nonfinite(float value) { return (std::bit_cast<uint32_t>(value) & kF32Abs) >= kF32Inf; }

}  // namespace bagua::kernels

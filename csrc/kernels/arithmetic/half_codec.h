// The work of the codecs fp16 and bf16 on an element before it is narrowed (contract: half_codec.h), for the CPU and
// for CUDA.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/common/dtype.h"
#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

inline constexpr uint32_t kQuietNan = 0x7fc00000u;  // narrows to 0x7e00 in f16 and 0x7fc0 in bf16

// The bits of the first f32 that narrows to Inf: halfway from the largest finite number to the next power of two.
constexpr uint32_t overflow_of(DType half) {
  return half == DType::kF16 ? std::bit_cast<uint32_t>(65520.0f) : 0x7f7f8000u;
}

// Returns true where the code is not finite.
BAGUA_INLINE bool narrows_to_nonfinite(float value, uint32_t overflow) {
  return (std::bit_cast<uint32_t>(value) & kF32Abs) >= overflow;
}

BAGUA_INLINE float with_canonical_nan(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(select((bits & kF32Abs) > kF32Inf, kQuietNan, bits));
}

}  // namespace bagua::kernels

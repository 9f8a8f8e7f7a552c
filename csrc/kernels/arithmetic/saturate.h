// The largest finite number of a type: decoders of values that may lie outside the range of what was encoded clamp to
// it, so that finite input decodes to finite output.
#pragma once

#include <limits>

#include "csrc/common/dtype.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

constexpr float largest_number(DType dtype) {
  if (dtype == DType::kF16) return 65504.0f;
  if (dtype == DType::kBF16) return 0x1.fep127f;
  return std::numeric_limits<float>::max();
}

// NaN stays NaN.
BAGUA_INLINE float saturated(float value, float largest) {
  return value > largest ? largest : value < -largest ? -largest : value;
}

}  // namespace bagua::kernels

// Contract of the subtraction that keeps a residual: what was to be sent minus what was sent. The destination and the
// source do not overlap; numel 0 is legal; NaN and infinity propagate. No allocation, no synchronisation.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"

namespace bagua::kernels {

// destination[i] -= source[i]
void subtract(float* destination, const float* source, size_t numel, Stream stream);

}  // namespace bagua::kernels

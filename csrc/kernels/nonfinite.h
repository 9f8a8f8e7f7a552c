// Contract of the search for NaN and infinity in what was reduced, on the CPU.
//
// Pointers need only be aligned to the element; numel 0 is legal and holds none. Only bits are looked at, so no
// arithmetic raises a floating-point flag. No allocation, no synchronisation.
#pragma once

#include <cstddef>

#include "csrc/common/dtype.h"

namespace bagua::kernels {

// Returns how many of the elements 0, stride, 2 stride, ... below numel are NaN or infinite; floating types, stride 1
// or more. A stride of the block of a codec, which turns blocks as a whole into NaN, reads one element of each.
size_t count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride);

}  // namespace bagua::kernels

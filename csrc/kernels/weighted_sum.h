// Contract of the weighted sum: what averaging with neighbours computes.
//
// Adds in f64 in index order and rounds at the end (f16 and bf16 by way of f32), so that the average of equal
// values is that value even where the weights, such as 1/3, are no binary fractions: ranks that agree stay as
// they are. (Not so for f64 itself, which may be off by a unit in the last place.)
// NaN and infinity propagate. numel 0 is legal. Pointers need only be aligned to the element. No
// allocation, no synchronisation.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace bagua::kernels {

// destination[i] = sum over s of weights[s] * sources[s][i]; num_sources at least 1. dtype in {f32, f64, f16, bf16}.
// The destination may be one of the sources, otherwise they must not overlap. On CUDA at most 1024 sources (128 with
// CUDA 12.0); more are an InvalidArgument.
void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel, Stream stream);

}  // namespace bagua::kernels

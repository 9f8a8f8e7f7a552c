// Contract of the reduction kernels: element-wise combination of arrays of one type.
//
// f16 and bf16 accumulate in f32 and round once to nearest even; integers wrap; MIN and MAX propagate
// NaN; bool is a byte of 0 or 1. AVG divides the sum by `num_sources` after the last addition. Sources
// are combined in index order, so every rank that reduces the same sources gets the same bits.
// numel 0 is legal. Pointers need only be aligned to the element. No allocation, no synchronisation.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace bagua::kernels {

// acc[i] = acc[i] op source[i]. For AVG this only adds; call `scale` at the end. `acc` and `source` must
// not overlap partially (identical is legal).
void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel, Stream stream);

// destination[d][i] = op over s of sources[s][i], for every d. A destination may be one of the sources
// (in place), otherwise they must not overlap. Works in cache-sized blocks, so that each source is read
// once from memory and each destination written once. On CUDA at most 1024 of each (128 with
// CUDA 12.0); more are an InvalidArgument.
void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel, Stream stream);

// data[i] *= factor; floating types only (f16 and bf16 through f32).
void scale(DType dtype, void* data, double factor, size_t numel, Stream stream);

}  // namespace bagua::kernels

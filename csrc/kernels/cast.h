// Contract of the float conversions. Narrowing rounds once to nearest even; NaN stays NaN (quiet), infinity
// stays infinity, overflow becomes infinity, subnormals are kept. numel 0 is legal; source and destination
// must not overlap. f32 and f64 pointers are aligned to the element, f16 and bf16 pointers may have any
// alignment, because they also point into messages.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace bagua::kernels {

// from, to in {f32, f64, f16, bf16}
void cast(DType from, const void* source, DType to, void* destination, size_t numel, Stream stream);

// accumulator[i] += float(source[i]); from in {f32, f16, bf16}
void cast_add(DType from, const void* source, float* accumulator, size_t numel, Stream stream);

}  // namespace bagua::kernels

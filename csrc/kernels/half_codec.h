// Contract of the codecs fp16 and bf16: the message is the elements themselves, rounded to a 16-bit float.
//
// Encoding is `cast` from f32, but for NaN, which becomes the canonical quiet NaN (0x7e00 in f16, 0x7fc0 in bf16), so
// that processors which make NaNs of different bits send the same ones. So a value beyond the largest finite number
// becomes Inf, and Inf stays it. Decoding is `cast`. A block is one element: elements whose code is not finite are
// counted, those that overflow too.
#pragma once

#include <cstddef>

#include "csrc/common/dtype.h"
#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// `option` is the DType of the wire, f16 or bf16.
extern const BlockKernels kHalf;

constexpr size_t half_wire_bytes(size_t numel, int) { return numel * 2; }

}  // namespace bagua::kernels

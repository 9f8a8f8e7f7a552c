// Contract of the conversion that the 16-bit codecs use: as `cast`, but finite stays finite and whatever
// is not finite becomes NaN, so that a receiver never mistakes one for the other.
//
// Rounds to nearest even; a finite value beyond the largest finite one of `to` becomes that one, with its
// sign; NaN and Inf become the canonical quiet NaN (0x7e00 in f16, 0x7fc0 in bf16) and are counted. The
// 16-bit side has any alignment, f32 is aligned to the element; no overlap; numel 0 is legal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels {

// from in {f32, f16, bf16}, to in {f16, bf16}. Unless `num_nonfinite` is null, adds to it the number of
// elements that were NaN or Inf; it lives where the stream runs (device memory on CUDA).
void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel, uint64_t* num_nonfinite,
                     Stream stream);

// The fused forms (fused.h) of the codecs whose codes are elements of `to`: encoding is saturating_cast from f32,
// decoding is cast to f32.
void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite, Stream stream);
void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite, Stream stream);

}  // namespace bagua::kernels

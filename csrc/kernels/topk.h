// Contract of the sparsifier: the wire format and the selection of codec `topk` (the largest of every block, arXiv
// 1712.01887 and 1809.07599). It loses most of what it encodes, so it is used with error feedback.
//
// A block is 2048 elements; only the last may be short. Of a block min(k, elements) elements travel. On the wire: their
// f32 values, then their uint16 indices in the block (both little-endian), both in ascending order of the index.
//
// The byte side and the f16 and bf16 side have any alignment, f32 is aligned to the element; source and destination do
// not overlap; numel 0 is legal. No allocation, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels {

// The selection: element i comes before element j if |x_i| > |x_j|, or if |x_i| == |x_j| and i < j; the first min(k,
// elements) travel. f32 values move as they are, the sign of a zero included, so there is no arithmetic, and no
// floating-point mode that could change a bit: without their sign, f32 bits order like magnitudes.
//
// decode: the values at their indices, +0 elsewhere. What is lost: |x - decoded|^2 <= (1 - k / elements) |x|^2.
//
// A NaN or Inf: all values of the block are NaN (0x7fc00000), the indices 0, 1, 2, ...; a block whose first value is
// NaN or Inf decodes to NaN. Only a damaged message holds an index past the end of its block: that element is dropped.
// Or one index twice: what becomes of that element is not defined.
inline constexpr size_t kTopkBlockNumel = 2048;
inline constexpr size_t kTopkMaxK = 256;
inline constexpr size_t kTopkElementBytes = 6;  // of one that travels

constexpr size_t topk_wire_bytes(size_t numel, int k) {
  const size_t most = static_cast<size_t>(k), tail = numel % kTopkBlockNumel;
  return (numel / kTopkBlockNumel * most + (tail < most ? tail : most)) * kTopkElementBytes;
}

// dtype in {f32, f16, bf16}, k in {8, 16, 32, 64, 128, 256}. Unless `num_nonfinite_blocks` is null, adds to it the
// number of blocks that held a NaN or an Inf; it lives where the stream runs (device memory on CUDA).
void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                 Stream stream);

// dtype in {f32, f16, bf16}; f16 and bf16 round the decoded value to nearest even.
void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);

// accumulator[i] += the decoded f32 value, which is not rounded to the sender's dtype first, where there is one; the
// others stay as they are, a -0 too.
void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);

// The fused forms (fused.h), dtype and `num_nonfinite_blocks` as above. The residual of the first is on.
void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);
void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);

}  // namespace bagua::kernels

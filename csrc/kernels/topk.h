// Contract of the sparsifier: the wire format and the selection of codec `topk` (the largest of every block, arXiv
// 1712.01887 and 1809.07599). It loses most of what it encodes, so it is used with error feedback.
//
// A block is 2048 elements; only the last may be short. Of a block min(k, elements) elements travel. On the wire: their
// f32 values, then their uint16 indices in the block (both little-endian), both in ascending order of the index.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

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
inline constexpr size_t kTopkMaxK = 256;
inline constexpr size_t kTopkElementBytes = 6;  // of one that travels

constexpr size_t topk_wire_bytes(size_t numel, int k) {
  const size_t most = static_cast<size_t>(k), tail = numel % kBlockNumel;
  return (numel / kBlockNumel * most + (tail < most ? tail : most)) * kTopkElementBytes;
}

// `option` is k: 8, 16, 32, 64, 128 or 256. `decode_add` leaves the elements that do not travel as they are, a -0 too.
extern const BlockKernels kTopk;

}  // namespace bagua::kernels

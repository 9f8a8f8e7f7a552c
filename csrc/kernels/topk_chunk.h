// Contract of the sparsifier in chunks: the wire format and the arithmetic of codec `topk` with chunk=4096 (SparseLoCo,
// arXiv 2508.15706; its transform: DeMo, 2411.19870). It loses most of what it encodes, so it is used with error
// feedback.
//
// A chunk is 4096 elements; only the last may be short. Of a chunk kept = min(k, elements) elements travel: those that
// the selection of topk.h takes. On the wire, all in ascending order of the index:
//
//   32 bits: kept f32 values
//   2 bits:  two levels, bf16, the lower one first; then ceil(kept / 4) bytes of codes, code j in the bits 2 (j mod 4)
//            and the next of byte j / 4
//   then ceil(3 kept / 2) bytes of indices: 12 bits each, index j from bit 12 j on
//
// Numbers are little-endian, the lowest bits of a byte come first, and the bits that are left over are 0. With the
// transform of arithmetic/dct.h all this is done to the 4096 coefficients of the chunk, which is filled up with zeros
// and taken as 64 rows of 64, in place of its elements; elements are what the inverse makes of the decoded
// coefficients.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"
#include "csrc/kernels/topk.h"

namespace bagua::kernels {

// Values of 32 bits move as they are. The arithmetic of those of 2 bits, |v| being the kept magnitudes:
//
//   mean = sum |v| / kept
//   lower = the mean of the |v| that are not above `mean`; upper = that of the others, and `lower` where there are none
//   code: bit 0 is set where the sign is negative, bit 1 where |v| > f32(lower) / 2 + f32(upper) / 2
//   decode: the level of bit 1, with the sign of bit 0; elements that do not travel are +0
//
// Sums are in f64 over 32 lanes, value j in lane j mod 32, the lanes then added in pairs l and l + 16, l + 8, ... 1; a
// mean is divided in f64. Levels are rounded to f32, to nearest even, and then toward zero to bf16, so that none is
// above the largest magnitude. On Gaussian values, k = 64, the squared error is 0.43 % of the kept squares; levels that
// are the means of the lower and of the upper half, as in SparseLoCo, lose 0.57 %. Zeros decode to zeros. The default
// floating-point environment is assumed.
//
// A NaN or Inf: the values, or the levels, are NaN (0x7fc00000 and 0x7fc0), the codes 0, the indices 0, 1, 2, ...; a
// chunk whose first value or level is NaN or Inf decodes to NaN. Only a damaged message holds an index past the end of
// its chunk: that element is dropped; a coefficient has none. Or one index twice: what becomes of that element is not
// defined.
inline constexpr size_t kTopkChunkNumel = 4096;
inline constexpr int kTopkChunkIndexBits = 12;
inline constexpr size_t kTopkChunkLevelBytes = 4;  // of both

// The `option` of the kernels.
struct TopkChunk {
  int k;  // 8, 16, 32, 64, 128 or 256
  bool has_2_bits;
  bool is_dct = false;

  static constexpr int kHas2Bits = 512, kIsDct = 1024;
  static constexpr TopkChunk of(int option) {
    return {option % kHas2Bits, (option & kHas2Bits) != 0, (option & kIsDct) != 0};
  }
  constexpr int option() const { return k + (has_2_bits ? kHas2Bits : 0) + (is_dct ? kIsDct : 0); }

  // The message of a chunk of which `kept` elements travel.
  constexpr size_t codes_bytes(size_t kept) const {
    return has_2_bits ? kTopkChunkLevelBytes + (kept + 3) / 4 : 4 * kept;
  }
  static constexpr size_t indices_bytes(size_t kept) { return (3 * kept + 1) / 2; }
  constexpr size_t chunk_bytes(size_t numel) const {
    const size_t most = static_cast<size_t>(k), kept = numel < most ? numel : most;
    return codes_bytes(kept) + indices_bytes(kept);
  }
};

constexpr size_t topk_chunk_wire_bytes(size_t numel, int option) {
  const TopkChunk chunk = TopkChunk::of(option);
  const size_t tail = numel % kTopkChunkNumel;
  return numel / kTopkChunkNumel * chunk.chunk_bytes(kTopkChunkNumel) + (tail == 0 ? 0 : chunk.chunk_bytes(tail));
}

// `decode_add` leaves the elements that do not travel as they are, a -0 too; with the transform it adds to all.
extern const BlockKernels kTopkChunk;

}  // namespace bagua::kernels

// Contract of the stochastic quantiser: the wire format and the arithmetic of codec `qsgd` (arXiv 1610.02132, with the
// largest magnitude of a block as its norm).
//
// A block is 2048 elements; only the last may be short. On the wire: the f32 norm (little-endian), then a code of 8, 4
// or 2 bits per element. With L = 2^(bits-1) - 1 levels a code is an integer from -L to L, stored as code + L. Let n be
// the block's elements rounded up to a multiple of 2 (of 4 for 2 bits), where zeros fill up. Codes of 8 bits lie in the
// order of the elements; of 4 bits byte j holds element j (low) and j + n/2; of 2 bits j, j + n/4, j + n/2 and j +
// 3n/4, from the lowest bits up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// The arithmetic, in f32 unless marked, every operation rounded by itself (no FMA):
//
//   norm = max |x|; s = 2^100 if norm < 2^-100, else 1
//   encode: code = floor((nearest_even(x * s * f32(L * 2^15 / (norm * s))) + u) / 2^15), where u is drawn evenly from
//           0 .. 2^15 - 1; L or -L where |x| is the norm. It lies in [-L, L] without a clamp.
//   decode: norm or -norm where |code| is L, else code * f32(norm * s / L) / s
//
// A step is norm / L. The expected value of what is decoded is x up to 3 * 2^-16 of a step: 2^-16 from rounding to an
// integer, and less than L * 2^-22 from rounding the factor, the product, the step and the decoded value to f32, which
// is 2 * 2^-16 with 8 bits. The error of one decoding is below one step and that. Where the result is subnormal, its
// rounding adds up to 2^-150 to both. A power of two s keeps the step a normal number, and nothing here depends on a
// flush-to-zero mode (torch.set_flush_denormal) but the addition to an accumulator, which is the processor's.
//
// Constant blocks are exact, -0.0 included: a block of zeros has the norm 0, -0.0 if all of them are, and the codes 0,
// and decodes to its norm. In other blocks a zero decodes to +0, so -0.0 loses its sign.
//
// Counter j of block b draws from derive_key(key, first / 2048 + b): the first half of its hash for element j, the
// second for element j + n/2.
//
// A NaN or Inf: the block's norm is NaN (0x7fc00000), its codes 0, and it decodes to NaN.
inline constexpr size_t kQsgdHeaderBytes = 4;

// Elements of a block, rounded up as above.
constexpr size_t qsgd_padded_numel(size_t numel, int bits) {
  const size_t unit = bits == 2 ? 4 : 2;
  return (numel + unit - 1) / unit * unit;
}
constexpr size_t qsgd_block_bytes(size_t numel, int bits) {
  return kQsgdHeaderBytes + qsgd_padded_numel(numel, bits) * static_cast<size_t>(bits) / 8;
}
constexpr size_t qsgd_wire_bytes(size_t numel, int bits) {
  const size_t tail = numel % kBlockNumel;
  return numel / kBlockNumel * qsgd_block_bytes(kBlockNumel, bits) + (tail == 0 ? 0 : qsgd_block_bytes(tail, bits));
}

// `option` is the bits: 8, 4 or 2.
extern const BlockKernels kQsgd;

}  // namespace bagua::kernels

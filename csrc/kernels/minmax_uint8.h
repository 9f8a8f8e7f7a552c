// Contract of the min-max quantiser: the wire format and the arithmetic of codec `minmax_uint8`.
//
// A block is 2048 elements; only the last may be short. On the wire: f32 min, f32 max (little-endian),
// then one uint8 code per element. The header holds min and max, not min and step: both sides derive the grid
// from them, the decoder clamps to them, and a block with min == max decodes to min, sign of zero included.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// The arithmetic, in f32 unless marked, every operation rounded by itself (no FMA):
//
//   range = max - min in f64; s = 2^100 if 0 < range < 2^-100, 2^-4 if range >= 2^126, else 1
//   step = f32(range * s / 255); inverse_step = f32(255 / (range * s)), both divided in f64
//   min <= 0 <= max: base = 0, z = nearest_even(-(min * s * inverse_step)), the code of 0; else base = min * s, z = 0
//   encode: code = min(255, nearest_even((x * s - base) * inverse_step + z)), the sum exact; 0 if range is 0
//   decode: clamp((base - z * step + code * step) / s, min, max); min if range is 0
//
// Zeros are exact: 0 has code z, and code z leads to 0. For that the grid moves by at most half a step, so that one of
// the ends falls off it: the clamp of the code or of the value takes it back in, and it is wrong by at most what the
// grid has moved. No code is below 0, because z was rounded from the product that min's code is rounded from. Where 0
// is not between min and max the grid begins at min.
//
// The power of two s is exact and keeps the step and its inverse normal numbers, so there is no epsilon:
// subnormal ranges and ranges that overflow f32 quantise as well as any. The error is at most range / 510
// plus f32 rounding, and what is decoded lies between min and max, so that it is finite in the sender's dtype, too.
// -0.0 counts as less than 0.0, and decodes to 0.0 where range is not 0. The default floating-point environment is
// assumed: under torch.set_flush_denormal, subnormal blocks decode differently.
//
// A NaN or Inf: the block's min and max are NaN (0x7fc00000), its codes 0, and it decodes to NaN.
inline constexpr size_t kMinmaxUint8HeaderBytes = 8;

constexpr size_t minmax_uint8_wire_bytes(size_t numel) {
  return numel + (numel + kBlockNumel - 1) / kBlockNumel * kMinmaxUint8HeaderBytes;
}

extern const BlockKernels kMinmaxUint8;

}  // namespace bagua::kernels

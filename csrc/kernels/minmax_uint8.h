// Contract of the min-max quantiser: the wire format and the arithmetic of codec `minmax_uint8`.
//
// A block is 2048 elements; only the last may be short. On the wire: f32 min, f32 max (little-endian),
// then one uint8 code per element. The header holds min and max, not min and step, because then both
// ends are exact: code 255 decodes to the stored max, code 0 to min, and a block with min == max decodes
// to min, sign of zero included. (A min below 2^-122 in magnitude beside a range of 2^126 loses 4 bits.)
//
// The byte side and the f16 and bf16 side have any alignment, f32 is aligned to the element; source and
// destination do not overlap; numel 0 is legal. No allocation, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/dtype.h"
#include "csrc/common/stream.h"

namespace bagua::kernels {

// The arithmetic, in f32 unless marked, every operation rounded by itself (no FMA):
//
//   range = max - min in f64; s = 2^100 if 0 < range < 2^-100, 2^-4 if range >= 2^126, else 1
//   encode: code = min(255, nearest_even((x * s - min * s) * f32(255 / (range * s)))); 0 if range is 0
//   decode: code == 255 ? max : (min * s + code * f32(range * s / 255)) / s
//
// The power of two s is exact and keeps the step and its inverse normal numbers, so there is no epsilon:
// subnormal ranges and ranges that overflow f32 quantise as well as any. The error is at most range / 510
// plus f32 rounding. -0.0 counts as less than 0.0. The default floating-point environment is assumed: under
// torch.set_flush_denormal, subnormal blocks decode differently.
//
// A NaN or Inf: the block's min and max are NaN (0x7fc00000), its codes 0, and it decodes to NaN.
inline constexpr size_t kMinmaxUint8BlockNumel = 2048;
inline constexpr size_t kMinmaxUint8HeaderBytes = 8;

constexpr size_t minmax_uint8_wire_bytes(size_t numel) {
  return numel + (numel + kMinmaxUint8BlockNumel - 1) / kMinmaxUint8BlockNumel * kMinmaxUint8HeaderBytes;
}

// dtype in {f32, f16, bf16}. Unless `num_nonfinite_blocks` is null, adds to it the number of blocks that
// held a NaN or an Inf; it lives where the stream runs (device memory on CUDA).
void minmax_uint8_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                         Stream stream);

// dtype in {f32, f16, bf16}; f16 and bf16 round the decoded value to nearest even.
void minmax_uint8_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);

// accumulator[i] += the decoded f32 value, which is not rounded to the sender's dtype first.
void minmax_uint8_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);

}  // namespace bagua::kernels

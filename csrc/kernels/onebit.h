// Contract of the sign quantiser: the wire format and the arithmetic of codec `onebit` (signs scaled by the mean
// magnitude, arXiv 1802.04434 and 2102.02888). It loses most of what it encodes, so it is used with error feedback.
//
// A block is 2048 elements; only the last may be short. On the wire: the f32 scale (little-endian), then a bit per
// element, 1 where the sign is negative. Let n be the block's elements rounded up to a multiple of 8; bit k of byte j
// is of element j + k * n/8. What is rounded up holds 0.
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

// The arithmetic: scale = f32(sum |x| / elements), in f64 over 64 lanes, element i in lane i mod 64, the lanes then
// added in pairs l and l + 32, l + 16, ... 1; decode: scale with the element's sign. Blocks of one value are exact, the
// sign of a zero included. A NaN or Inf: the block's scale is NaN (0x7fc00000), its signs are 0, because the sign of a
// NaN that was computed differs between processors, and it decodes to NaN.
inline constexpr size_t kOnebitBlockNumel = 2048;
inline constexpr size_t kOnebitHeaderBytes = 4;

constexpr size_t onebit_wire_bytes(size_t numel) {
  const size_t tail = numel % kOnebitBlockNumel;
  return numel / kOnebitBlockNumel * (kOnebitHeaderBytes + kOnebitBlockNumel / 8) +
         (tail == 0 ? 0 : kOnebitHeaderBytes + (tail + 7) / 8);
}

// dtype in {f32, f16, bf16}. Unless `num_nonfinite_blocks` is null, adds to it the number of blocks that held a NaN or
// an Inf; it lives where the stream runs (device memory on CUDA).
void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                   Stream stream);

// dtype in {f32, f16, bf16}; f16 and bf16 round the decoded value to nearest even.
void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);

// accumulator[i] += the decoded f32 value, which is not rounded to the sender's dtype first.
void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);

// The fused forms (fused.h), dtype and `num_nonfinite_blocks` as above. The residual of the first is on.
void onebit_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                 uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);
void onebit_reduce_encode(const Contributions& contributions, double factor, const Residual& residual, size_t numel,
                          uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);

}  // namespace bagua::kernels

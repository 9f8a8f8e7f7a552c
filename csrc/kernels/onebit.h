// Contract of the sign quantiser: the wire format and the arithmetic of codec `onebit` (signs scaled by the mean
// magnitude, arXiv 1802.04434 and 2102.02888). It loses most of what it encodes, so it is used with error feedback.
//
// A block is 2048 elements; only the last may be short. On the wire: the f32 scale (little-endian), then a bit per
// element, 1 where the sign is negative. Let n be the block's elements rounded up to a multiple of 8; bit k of byte j
// is of element j + k * n/8. What is rounded up holds 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// The arithmetic: scale = f32(sum |x| / elements), in f64 over 64 lanes, element i in lane i mod 64, the lanes then
// added in pairs l and l + 32, l + 16, ... 1; decode: scale with the element's sign. Blocks of one value are exact, the
// sign of a zero included. A NaN or Inf: the block's scale is NaN (0x7fc00000), its signs are 0, because the sign of a
// NaN that was computed differs between processors, and it decodes to NaN.
inline constexpr size_t kOnebitHeaderBytes = 4;

constexpr size_t onebit_wire_bytes(size_t numel) {
  const size_t tail = numel % kBlockNumel;
  return numel / kBlockNumel * (kOnebitHeaderBytes + kBlockNumel / 8) +
         (tail == 0 ? 0 : kOnebitHeaderBytes + (tail + 7) / 8);
}

extern const BlockKernels kOnebit;

}  // namespace bagua::kernels

// Contract of the quantiser to four centroids: the wire format and the arithmetic of codec `centroid` (MuLoCo, arXiv
// 2505.23725). It loses a fifth of the squares of what it encodes, so it is used with error feedback.
//
// A block is 2048 elements; only the last may be short. On the wire: the f32 mean and the f32 standard deviation sigma
// (little-endian), then a code of 2 bits per element. Let n be the block's elements rounded up to a multiple of 4; byte
// j holds element j (lowest bits), j + n/4, j + n/2 and j + 3n/4. What is rounded up has the code 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// The arithmetic, in f64 and then rounded to f32:
//
//   mean = sum x / elements; sigma = sqrt(sum (x - mean)^2 / elements), with the mean as it is on the wire
//   code = how many of mean - 1.5 sigma, mean and mean + 1.5 sigma are below x
//   decode: mean + (code - 1.5) 1.5 sigma, clamped to the largest finite number of f32, and of the type it is stored as
//
// So there are four levels in steps of 1.5 sigma = 6 sigma / 4 around the mean, of which each element has the nearest.
// Sums are over 64 lanes from -0 on, element i in lane i mod 64, the lanes then added in pairs l and l + 32, l + 16,
// ...
// 1. The error of an element is at most 0.75 sigma where it is within 3 sigma of the mean, and else its distance from
// the outer level. On Gaussian values 19 % of the squares are lost. A block of one large element among zeros loses up
// to 1.56 times its squares, once: with error feedback residuals stay bounded.
//
// Blocks of one value are exact, the sign of a zero included. A NaN or Inf: mean and sigma are NaN (0x7fc00000), the
// codes 0, and the block decodes to NaN, as it does where a damaged message has a NaN or an Inf in one of the two. The
// default floating-point environment is assumed.
inline constexpr size_t kCentroidHeaderBytes = 8;

constexpr size_t centroid_wire_bytes(size_t numel) {
  const size_t tail = numel % kBlockNumel;
  return numel / kBlockNumel * (kCentroidHeaderBytes + kBlockNumel / 4) +
         (tail == 0 ? 0 : kCentroidHeaderBytes + (tail + 3) / 4);
}

extern const BlockKernels kCentroid;

}  // namespace bagua::kernels

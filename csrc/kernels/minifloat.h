// Contract of the small floats: the wire format and the arithmetic of the codecs `fp8_e4m3` and `fp8_e5m2` (OCP 8-bit
// floating point, arXiv 2209.05433), `fp4_e2m1` (OCP microscaling formats, arXiv 2310.10537) and `fp4_e3m0` (arXiv
// 2501.18512), scaled per block.
//
// A block is 2048 elements; only the last may be short. On the wire: the f32 norm (little-endian), then a code of 8 or
// 4 bits per element, the sign above the magnitude's code. Codes of 8 bits lie in the order of the elements; of 4 bits
// byte j holds element j (low) and j + n/2, where n is the block's elements rounded up to a multiple of 2 and a zero
// fills up. That is 8.016 or 4.016 bits per element; a norm in bf16 would save 0.008 of them, and round the largest
// element and every constant block. The magnitudes by code:
//
//   E4M3   c * 2^-9 below code 8, else (8 + c % 8) * 2^(c / 8 - 10), up to 448, code 126
//   E5M2   c * 2^-16 below code 4, else (4 + c % 4) * 2^(c / 4 - 17), up to 57344, code 123
//   E2M1   0, 0.5, 1, 1.5, 2, 3, 4, 6
//   E3M0   0, then 2^(c - 3): 0.25, 0.5, 1, 2, 4, 8, 16
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels {

// The `option` of the kernels.
enum class Minifloat : int { kE4M3, kE5M2, kE2M1, kE3M0 };
inline constexpr int kNumMinifloats = 4;

// The arithmetic, in f32 unless marked, every operation rounded by itself (no FMA), with M the largest magnitude:
//
//   norm = max |x|; s = 2^100 if norm < 2^-80, else 1
//   units = f32(M / (norm * s)), step = f32(norm * s / M), both divided in f64; units = 0 if norm is 0
//   encode: the number nearest to x * s * units, of two equally near ones that of the even code, with the sign of x
//   decode: norm with the code's sign if the magnitude is M, else number * step / s
//
// Nothing saturates: the factor and the product are off by 2^-24 each, so no product is beyond M (1 + 2^-22), which
// rounds to M. The error is at most half the distance of the two numbers around x * M / norm, in units of norm / M, and
// what rounding to f32 adds. What is decoded lies in [-norm, norm], so it is finite in the sender's dtype, too. Blocks
// of one magnitude are exact, and zeros, with their signs. A power of two s keeps factor, step and product normal
// numbers, and nothing here depends on a flush-to-zero mode (torch.set_flush_denormal) but the addition to an
// accumulator, which is the processor's.
//
// A NaN or Inf: the block's norm is NaN (0x7fc00000), its codes 0, and it decodes to NaN. Codes above that of M, NaN
// and Inf in OCP's tables, are in damaged messages only; they continue the formulas above.
inline constexpr size_t kMinifloatHeaderBytes = 4;

constexpr int minifloat_bits(Minifloat type) { return type == Minifloat::kE4M3 || type == Minifloat::kE5M2 ? 8 : 4; }

constexpr size_t minifloat_wire_bytes(size_t numel, int type) {
  const size_t per_byte = minifloat_bits(static_cast<Minifloat>(type)) == 8 ? 1 : 2;  // which divides a whole block
  return (numel + per_byte - 1) / per_byte + (numel + kBlockNumel - 1) / kBlockNumel * kMinifloatHeaderBytes;
}

extern const BlockKernels kMinifloat;

}  // namespace bagua::kernels

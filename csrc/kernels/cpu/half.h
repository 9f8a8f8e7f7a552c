// The conversions between arrays of f32 and of the 16-bit floats, which the other CPU kernels call on cache-sized
// pieces; arithmetic/half.h defines them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/arithmetic/half.h"

namespace bagua::kernels::cpu {

// An element behind a pointer of any alignment: the byte side of a codec.
using unaligned_u16 = uint16_t __attribute__((aligned(1), may_alias));

// Kernels convert this many elements at a time on the stack: 8 KB of f32, in L1 beside what it came from.
inline constexpr size_t kHalfBlockNumel = 2048;

// Source and destination do not overlap; the 16-bit side has any alignment.
void widen_f16(const unaligned_u16* source, float* destination, size_t numel);
void widen_bf16(const unaligned_u16* source, float* destination, size_t numel);
void narrow_f16(const float* source, unaligned_u16* destination, size_t numel);
void narrow_bf16(const float* source, unaligned_u16* destination, size_t numel);

}  // namespace bagua::kernels::cpu

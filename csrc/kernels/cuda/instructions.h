// Single instructions of the GPU that C++ has no word for, and what they do elsewhere.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {

#if !defined(__CUDACC__)
// -0.0 is below 0.0.
inline bool emulated_is_less(float a, float b) {
  return a < b || (a == b && std::bit_cast<uint32_t>(a) >> 31 > std::bit_cast<uint32_t>(b) >> 31);
}
inline bool emulated_is_nan(float a) { return (std::bit_cast<uint32_t>(a) & kF32Abs) > kF32Inf; }
inline float emulated_any_nan() { return std::bit_cast<float>(kF32Abs); }
#endif

// The smaller and the greater of two numbers, -0.0 below 0.0.
__device__ __forceinline__ float lesser(float a, float b) {
#if defined(__CUDACC__)
  return fminf(a, b);
#else
  return emulated_is_less(b, a) ? b : a;
#endif
}
__device__ __forceinline__ float greater(float a, float b) {
#if defined(__CUDACC__)
  return fmaxf(a, b);
#else
  return emulated_is_less(a, b) ? b : a;
#endif
}

// The same, and a NaN where one of them is NaN.
__device__ __forceinline__ float lesser_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return emulated_is_nan(a) || emulated_is_nan(b) ? emulated_any_nan() : lesser(a, b);
#endif
}
__device__ __forceinline__ float greater_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return emulated_is_nan(a) || emulated_is_nan(b) ? emulated_any_nan() : greater(a, b);
#endif
}

// The result for NaN may be another NaN. It takes no instruction: those on floats have it as a modifier of an operand.
__device__ __forceinline__ float absolute(float value) {
#if defined(__CUDACC__)
  return fabsf(value);
#else
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) & kF32Abs);
#endif
}

// The conversions of arithmetic/half.h, but for which NaN comes out.
__device__ __forceinline__ float number_of_f16(uint16_t half) {
#if defined(__CUDACC__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
  return result;
#else
  return f16_to_f32(half);
#endif
}
__device__ __forceinline__ float number_of_bf16(uint16_t half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}
// Narrows two numbers at once, the first in the lower half.
__device__ __forceinline__ uint32_t f16_of_numbers(float first, float second) {
#if defined(__CUDACC__)
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
#else
  return f32_to_f16(first) | static_cast<uint32_t>(f32_to_f16(second)) << 16;
#endif
}
__device__ __forceinline__ uint32_t bf16_of_numbers(float first, float second) {
#if defined(__CUDACC__)
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
#else
  return f32_to_bf16(first) | static_cast<uint32_t>(f32_to_bf16(second)) << 16;
#endif
}

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ uint32_t scan_of_warp(uint32_t value) {
#pragma unroll
  for (int distance = 1; distance < kWarpNumThreads; distance *= 2) {
#if defined(__CUDACC__)
    // C++ has no word for the predicate that says whether there is such a lane.
    asm volatile(
        "{ .reg .u32 below; .reg .pred is_there;"
        " shfl.sync.up.b32 below|is_there, %0, %1, 0, 0xffffffff;"
        " @is_there add.u32 %0, %0, below; }"
        : "+r"(value)
        : "r"(distance));
#else
    const uint32_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_index() >= distance) value += below;
#endif
  }
  return value;
}

// 2^23 under whose exponent a byte is put, so that 2^23 + byte is a number. Who decodes has its bits in shared memory:
// of a constant nvcc makes an immediate operand, and then each element's selector, which is one here, takes an
// instruction more to get into a register.
inline constexpr float kByteUnit = 0x1p23f;
inline constexpr uint32_t kByteUnitBits = std::bit_cast<uint32_t>(kByteUnit);

__device__ __forceinline__ float byte_above(uint32_t unit_bits, uint32_t word, int i) {
  return std::bit_cast<float>(__byte_perm(word, unit_bits, 0x7440u | static_cast<uint32_t>(i)));
}

// Byte `i` of a word as a number, less `bias`.
__device__ __forceinline__ float byte_to_f32(uint32_t unit_bits, uint32_t word, int i, int bias) {
  return byte_above(unit_bits, word, i) - (kByteUnit + static_cast<float>(bias));
}

// Products of bytes and one factor, in two instructions: fma(2^23 + byte, factor, -2^23 * factor) is byte * factor,
// rounded once, as 2^23 * factor is exact where it is finite.
struct ByteProduct {
  ByteProduct() = default;
  __device__ __forceinline__ explicit ByteProduct(float factor_)
      : unit_bits(kByteUnitBits), factor(factor_), minus_unit(-(kByteUnit * factor_)) {}

  __device__ __forceinline__ bool is_exact() const { return minus_unit - minus_unit == 0.0f; }
  // With byte `i` of the word.
  __device__ __forceinline__ float of(uint32_t word, int i) const {
    return __fmaf_rn(byte_above(unit_bits, word, i), factor, minus_unit);
  }

  uint32_t unit_bits;
  float factor, minus_unit;
};

// A word of byte `kByte` of each of four.
template <int kByte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kBoth = kByte | (4u + kByte) << 4;
  return __byte_perm(__byte_perm(a, b, kBoth), __byte_perm(c, d, kBoth), 0x5410u);
}

}  // namespace bagua::kernels::cuda

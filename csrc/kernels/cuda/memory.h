// Loads and stores of a few consecutive elements by one thread: with one instruction of up to 16 bytes where the
// address is aligned to it and all of them exist, else one by one, and by bytes where they may have any alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "csrc/common/dtype.h"
#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/cuda/instructions.h"

namespace bagua::kernels::cuda {

template <int kNumBytes>
struct VectorOf;
template <>
struct VectorOf<4> {
  using Type = uint1;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<16> {
  using Type = uint4;
};

template <int kNumBytes>
__host__ __device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kNumBytes == 0;
}

// The address as one of vectors, to which it is aligned: a GPU fails where it is not, the tests look.
template <typename Vector>
__device__ __forceinline__ const Vector* as_vectors(const void* address) {
#if !defined(__CUDACC__)
  emulated_expect_aligned(address, sizeof(Vector));
#endif
  return static_cast<const Vector*>(address);
}
template <typename Vector>
__device__ __forceinline__ Vector* as_vectors(void* address) {
#if !defined(__CUDACC__)
  emulated_expect_aligned(address, sizeof(Vector));
#endif
  return static_cast<Vector*>(address);
}

// kNumel elements that lie side by side, so that they move in vectors of up to 16 bytes.
template <typename T, int kNumel>
struct Elements {
  static constexpr int kVectorBytes = kNumel * sizeof(T) < 16 ? kNumel * static_cast<int>(sizeof(T)) : 16;
  static constexpr int kVectorNumel = kVectorBytes / static_cast<int>(sizeof(T));
  static constexpr int kNumVectors = kNumel / kVectorNumel;
  using Vector = typename VectorOf<kVectorBytes>::Type;
  struct Part {
    T element[kVectorNumel];
  };

  T element[kNumel];
};

// All of them, where the address is aligned to a vector.
template <typename T, int kNumel>
__device__ __forceinline__ void load_vectors(const T* from, Elements<T, kNumel>& to) {
  using Of = Elements<T, kNumel>;
#pragma unroll
  for (int v = 0; v < Of::kNumVectors; ++v) {
    const auto part = std::bit_cast<typename Of::Part>(as_vectors<typename Of::Vector>(from)[v]);
#pragma unroll
    for (int i = 0; i < Of::kVectorNumel; ++i) to.element[v * Of::kVectorNumel + i] = part.element[i];
  }
}
template <typename T, int kNumel>
__device__ __forceinline__ void store_vectors(const Elements<T, kNumel>& from, T* to) {
  using Of = Elements<T, kNumel>;
#pragma unroll
  for (int v = 0; v < Of::kNumVectors; ++v) {
    typename Of::Part part;
#pragma unroll
    for (int i = 0; i < Of::kVectorNumel; ++i) part.element[i] = from.element[v * Of::kVectorNumel + i];
    as_vectors<typename Of::Vector>(to)[v] = std::bit_cast<typename Of::Vector>(part);
  }
}

// The first `num`; the others become `padding`. uint16_t may have any alignment, other types their own.
template <typename T, int kNumel>
__device__ __forceinline__ void load_singly(const T* from, int num, T padding, Elements<T, kNumel>& to) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (!is_aligned<2>(from)) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(from);
#pragma unroll
      for (int i = 0; i < kNumel; ++i) {
        to.element[i] = i < num ? static_cast<uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8) : padding;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) to.element[i] = i < num ? from[i] : padding;
}
template <typename T, int kNumel>
__device__ __forceinline__ void store_singly(const Elements<T, kNumel>& from, int num, T* to) {
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (!is_aligned<2>(to)) {
      auto* bytes = reinterpret_cast<uint8_t*>(to);
#pragma unroll
      for (int i = 0; i < kNumel; ++i) {
        if (i >= num) continue;
        bytes[2 * i] = static_cast<uint8_t>(from.element[i]);
        bytes[2 * i + 1] = static_cast<uint8_t>(from.element[i] >> 8);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    if (i < num) to[i] = from.element[i];
  }
}

// All of them by vectors where it is known that `kIsWhole`, else the first `num`; the others become 0.
template <bool kIsWhole, typename T, int kNumel>
__device__ __forceinline__ void load_known(const T* from, int num, Elements<T, kNumel>& to) {
  if constexpr (kIsWhole) {
    load_vectors(from, to);
  } else {
    load_singly(from, num, T{0}, to);
  }
}

// The same, by vectors where that is possible; `num` may be less than 0 or more than all.
template <typename T, int kNumel>
__device__ __forceinline__ void load(const T* from, int num, T padding, Elements<T, kNumel>& to) {
  if (num >= kNumel && is_aligned<Elements<T, kNumel>::kVectorBytes>(from)) {
    load_vectors(from, to);
  } else {
    load_singly(from, num, padding, to);
  }
}
template <typename T, int kNumel>
__device__ __forceinline__ void store(const Elements<T, kNumel>& from, int num, T* to) {
  if (num >= kNumel && is_aligned<Elements<T, kNumel>::kVectorBytes>(to)) {
    store_vectors(from, to);
  } else {
    store_singly(from, num, to);
  }
}

// The bytes of a message: the first `num` of 4, which may be less than 0 or more than 4, the first lowest. `kIsWhole`:
// all of them, aligned.
template <bool kIsWhole = false>
__device__ __forceinline__ uint32_t load_bytes(const uint8_t* from, int num) {
  if constexpr (kIsWhole) {
    return as_vectors<uint1>(from)->x;
  } else {
    if (num >= 4 && is_aligned<4>(from)) return load_bytes<true>(from, num);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < num) word |= static_cast<uint32_t>(from[i]) << (8 * i);
    }
    return word;
  }
}
template <bool kIsWhole = false>
__device__ __forceinline__ void store_bytes(uint32_t word, int num, uint8_t* to) {
  if constexpr (kIsWhole) {
    *as_vectors<uint1>(to) = uint1{word};
  } else {
    if (num >= 4 && is_aligned<4>(to)) return store_bytes<true>(word, num, to);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < num) to[i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

__device__ __forceinline__ float load_f32(const uint8_t* from) { return std::bit_cast<float>(load_bytes(from, 4)); }
__device__ __forceinline__ void store_f32(float value, uint8_t* to) {
  store_bytes(std::bit_cast<uint32_t>(value), 4, to);
}

// How elements of a floating type lie in memory, and what they are in f32; f64 stays f64. `number` is `widen` but for
// which NaN comes out, `narrow_pair` takes numbers only: each is one instruction.
template <DType kDType>
struct Floating;
template <>
struct Floating<DType::kF64> {
  using Stored = double;
  static __device__ __forceinline__ double widen(double value) { return value; }
  static __device__ __forceinline__ double narrow(double value) { return value; }
};
template <>
struct Floating<DType::kF32> {
  using Stored = float;
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ float number(float value) { return value; }
  static __device__ __forceinline__ float narrow(float value) { return value; }
};
template <>
struct Floating<DType::kF16> {
  using Stored = uint16_t;
  static __device__ __forceinline__ float widen(uint16_t value) { return f16_to_f32(value); }
  static __device__ __forceinline__ uint16_t narrow(float value) { return f32_to_f16(value); }
  static __device__ __forceinline__ float number(uint16_t value) { return number_of_f16(value); }
  static __device__ __forceinline__ uint32_t narrow_pair(float first, float second) {
    return f16_of_numbers(first, second);
  }
};
template <>
struct Floating<DType::kBF16> {
  using Stored = uint16_t;
  static __device__ __forceinline__ float widen(uint16_t value) { return bf16_to_f32(value); }
  static __device__ __forceinline__ uint16_t narrow(float value) { return f32_to_bf16(value); }
  static __device__ __forceinline__ float number(uint16_t value) { return number_of_bf16(value); }
  static __device__ __forceinline__ uint32_t narrow_pair(float first, float second) {
    return bf16_of_numbers(first, second);
  }
};

// The values, none of them NaN, as elements of a 16-bit type.
template <DType kDType, int kNumel>
__device__ __forceinline__ void narrow_numbers(const float* values, Elements<uint16_t, kNumel>& elements) {
#pragma unroll
  for (int i = 0; i < kNumel; i += 2) {
    const uint32_t pair = Floating<kDType>::narrow_pair(values[i], values[i + 1]);
    elements.element[i] = static_cast<uint16_t>(pair);
    elements.element[i + 1] = static_cast<uint16_t>(pair >> 16);
  }
}

// The first `num` of kNumel elements from `first` on, as f32, but for which NaN; the others become `padding`, which
// every type holds. `kIsWhole`: it is known that there are all of them, aligned to a vector.
template <DType kDType, int kNumel, bool kIsWhole = false>
__device__ __forceinline__ void load_f32(const void* array, size_t first, int num, float padding, float* values) {
  using Stored = typename Floating<kDType>::Stored;
  const Stored* from = static_cast<const Stored*>(array) + first;
  Elements<Stored, kNumel> elements;
  if constexpr (kIsWhole) {
    load_vectors(from, elements);
  } else {
    load(from, num, Floating<kDType>::narrow(padding), elements);
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) values[i] = Floating<kDType>::number(elements.element[i]);
}
template <DType kDType, int kNumel, bool kIsWhole = false>
__device__ __forceinline__ void store_f32(const float* values, size_t first, int num, void* array) {
  using Stored = typename Floating<kDType>::Stored;
  Stored* to = static_cast<Stored*>(array) + first;
  Elements<Stored, kNumel> elements;
#pragma unroll
  for (int i = 0; i < kNumel; ++i) elements.element[i] = Floating<kDType>::narrow(values[i]);
  if constexpr (kIsWhole) {
    store_vectors(elements, to);
  } else {
    store(elements, num, to);
  }
}

// Calls body(std::integral_constant<DType, dtype>) for f32, f16 or bf16: kernels are compiled per type.
template <typename Body>
void for_float_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kF16: return body(std::integral_constant<DType, DType::kF16>{});
    case DType::kBF16: return body(std::integral_constant<DType, DType::kBF16>{});
    default: return body(std::integral_constant<DType, DType::kF32>{});
  }
}

}  // namespace bagua::kernels::cuda

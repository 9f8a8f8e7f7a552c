// The residual of the fused kernels (fused.h) as a thread sees it: its elements are added to what it encodes, and
// renewed. Its type is a question per call, not a kernel of its own: all threads answer it alike.
#pragma once

#include <type_traits>

#include "csrc/kernels/cuda/memory.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels::cuda {

// Calls body(std::integral_constant<DType, dtype>) with the residual's type.
template <typename Body>
__device__ __forceinline__ void with_type(const Residual& residual, Body body) {
  if (residual.dtype == DType::kF32) {
    body(std::integral_constant<DType, DType::kF32>{});
  } else {
    body(std::integral_constant<DType, DType::kBF16>{});
  }
}

// values += the first `num` of kNumel elements from `first` on.
template <int kNumel>
__device__ __forceinline__ void add_residual(const Residual& residual, size_t first, int num, float* values) {
  if (residual.in == nullptr) return;
  with_type(residual, [&](auto type) {
    float addends[kNumel];
    load_f32<decltype(type)::value, kNumel>(residual.in, first, num, 0.0f, addends);
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      if (i < num) values[i] += addends[i];
    }
  });
}

template <int kNumel>
__device__ __forceinline__ void store_residual(const float* left, const Residual& residual, size_t first, int num) {
  with_type(residual, [&](auto type) { store_f32<decltype(type)::value, kNumel>(left, first, num, residual.out); });
}

}  // namespace bagua::kernels::cuda

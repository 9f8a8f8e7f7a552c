// The residual of the fused kernels (fused.h) as a thread sees it: its elements are added to what it encodes, and
// renewed. Its type is a question per call, not a kernel of its own: all threads answer it alike.
#pragma once

#include "csrc/kernels/cuda/memory.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels::cuda {

// values += the first `num` of kNumel elements from `first` on.
template <int kNumel>
__device__ __forceinline__ void add_residual(const Residual& residual, size_t first, int num, float* values) {
  if (residual.in == nullptr) return;
  float addends[kNumel];
  if (residual.dtype == DType::kF32) {
    load_f32<DType::kF32, kNumel>(residual.in, first, num, 0.0f, addends);
  } else {
    load_f32<DType::kBF16, kNumel>(residual.in, first, num, 0.0f, addends);
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    if (i < num) values[i] += addends[i];  // padding stays what it is: -0.0 has a meaning
  }
}

template <int kNumel>
__device__ __forceinline__ void store_residual(const float* left, const Residual& residual, size_t first, int num) {
  if (residual.dtype == DType::kF32) {
    store_f32<DType::kF32, kNumel>(left, first, num, residual.out);
  } else {
    store_f32<DType::kBF16, kNumel>(left, first, num, residual.out);
  }
}

}  // namespace bagua::kernels::cuda

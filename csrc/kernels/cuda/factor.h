// The factor of kernels::scale (arithmetic/reduce.h: finish) as a kernel takes it: in f32 where that gives the same
// bits.
#pragma once

#include "csrc/kernels/arithmetic/reduce.h"
#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {

struct Factor {
  explicit Factor(double factor)
      : wide(factor),
        narrow(static_cast<float>(factor)),
        is_narrow(static_cast<double>(narrow) == factor),
        is_one(factor == 1.0) {}

  __device__ __forceinline__ float operator()(float value) const {
    return is_narrow ? finish(value, narrow) : finish(value, wide);
  }
  // All of them; asked once which product it is.
  template <int kNumel>
  __device__ __forceinline__ void scale(float* values) const {
    if (is_one) return;
    if (is_narrow) {
#pragma unroll
      for (int i = 0; i < kNumel; ++i) values[i] = finish(values[i], narrow);
    } else {
#pragma unroll
      for (int i = 0; i < kNumel; ++i) values[i] = finish(values[i], wide);
    }
  }

  double wide;
  float narrow;
  bool is_narrow, is_one;
};

}  // namespace bagua::kernels::cuda

// CUDA form of the subtraction; contract: subtract.h.
#include "csrc/kernels/subtract.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"

namespace bagua::kernels::cuda {
namespace {

struct Subtract {
  static constexpr int kNumel = 4;
  static constexpr bool kCounts = false;
  struct Loaded {
    Elements<float, kNumel> minuend, subtrahend;
  };

  float* destination;
  const float* source;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    cuda::load(destination + first, num, 0.0f, loaded.minuend);
    cuda::load(source + first, num, 0.0f, loaded.subtrahend);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) loaded.minuend.element[i] -= loaded.subtrahend.element[i];
    cuda::store(loaded.minuend, num, destination + first);
    return 0;
  }
};

}  // namespace

void subtract(float* destination, const float* source, size_t numel, Stream stream) {
  launch_elementwise("subtract", stream, Subtract{destination, source}, numel);
}

}  // namespace bagua::kernels::cuda

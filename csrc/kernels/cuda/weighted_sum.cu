// CUDA form of the weighted sum; contract: weighted_sum.h. A thread reads its elements of every source before it
// writes, so the destination may be one of them.
#include "csrc/kernels/weighted_sum.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"
#include "csrc/kernels/cuda/pointers.h"

namespace bagua::kernels::cuda {
namespace {

template <DType kDType>
struct ByF32 {
  using Stored = typename Floating<kDType>::Stored;
  static __device__ __forceinline__ double widen(Stored value) {
    return static_cast<double>(Floating<kDType>::widen(value));
  }
  static __device__ __forceinline__ Stored narrow(double value) {
    return Floating<kDType>::narrow(static_cast<float>(value));
  }
};

template <typename T, typename Convert, int kCapacity>
struct WeightedSum {
  static constexpr int kNumel = 16 / sizeof(T) < 4 ? 16 / sizeof(T) : 4;  // more sums in f64 would fill the registers
  static constexpr bool kCounts = false;
  using Loaded = Elements<T, kNumel>;

  Sources<kCapacity> sources;
  T* destination;
  double weights[kCapacity];

  template <bool kIsWhole>
  __device__ __forceinline__ void load_as(size_t first, int num, Loaded& loaded) const {
    double sums[kNumel];
    Loaded next;
    load_known<kIsWhole>(static_cast<const T*>(sources.at[0]) + first, num, next);
#pragma unroll
    for (int i = 0; i < kNumel; ++i) sums[i] = weights[0] * Convert::widen(next.element[i]);
#pragma unroll(kIsWhole ? kUnrolled : 1)
    for (int s = 1; s < sources.count; ++s) {
      load_known<kIsWhole>(static_cast<const T*>(sources.at[s]) + first, num, next);
#pragma unroll
      for (int i = 0; i < kNumel; ++i) sums[i] += weights[s] * Convert::widen(next.element[i]);
    }
#pragma unroll
    for (int i = 0; i < kNumel; ++i) loaded.element[i] = Convert::narrow(sums[i]);
  }
  __device__ void load(size_t first, int num, Loaded& loaded) const {
    if (num == kNumel && sources.are_aligned) {
      load_as<true>(first, num, loaded);
    } else {
      load_as<false>(first, num, loaded);
    }
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    cuda::store(loaded, num, destination + first);
    return 0;
  }
};

template <typename T, typename Convert, int kCapacity>
void launch_weighted_sum(const Sources<kCapacity>& sources, const double* weights, void* destination, size_t numel,
                         Stream stream) {
  WeightedSum<T, Convert, kCapacity> operation{sources, static_cast<T*>(destination), {}};
  for (int s = 0; s < sources.count; ++s) operation.weights[s] = weights[s];
  launch_elementwise("weighted_sum", stream, operation, numel);
}

}  // namespace

void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel, Stream stream) {
  for_capacity("weighted_sum", num_sources, [&](auto capacity) {
    const Sources<capacity()> from(sources, num_sources);
    if (dtype == DType::kF64) {
      return launch_weighted_sum<double, Floating<DType::kF64>>(from, weights, destination, numel, stream);
    }
    for_float_type(dtype, [&](auto type) {
      using Convert = ByF32<decltype(type)::value>;
      launch_weighted_sum<typename Convert::Stored, Convert>(from, weights, destination, numel, stream);
    });
  });
}

}  // namespace bagua::kernels::cuda

// The walk of the elementwise kernels: a thread takes kNumVectors vectors of consecutive elements, loads all of them
// before it stores the first, so that enough bytes are on their way, and neighbouring threads take neighbouring
// vectors. What happens to an element is in the file of each kernel, as an `Operation`, which is passed by value:
//
//   static constexpr int kNumel           elements of a vector
//   struct Loaded                         what one vector's inputs become
//   void load(size_t first, int num, Loaded&) const
//   int store(size_t first, int num, Loaded&) const   returns what is to be counted
//   static constexpr bool kCounts; uint64_t* count    whether and, unless null, where the sum of that is added
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/cuda/launch.h"
#include "csrc/kernels/cuda/memory.h"

namespace bagua::kernels::cuda {

inline constexpr int kNumVectors = 2;

// All lanes call it. One atomic of a warp that has found something, which is rare.
__device__ __forceinline__ void add_to_count(int found, uint64_t* count) {
  const int total = __reduce_add_sync(kAllLanes, found);
  if (total != 0 && lane_index() == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(total));
  }
}

template <typename Operation>
__global__ void __launch_bounds__(kNumThreads)
    elementwise_kernel(const __grid_constant__ Operation operation, size_t numel) {
  constexpr int kNumel = Operation::kNumel;
  const size_t begin = (static_cast<size_t>(blockIdx.x) * (kNumVectors * kNumThreads) + threadIdx.x) * kNumel;
  typename Operation::Loaded loaded[kNumVectors];
  int num[kNumVectors];
#pragma unroll
  for (int v = 0; v < kNumVectors; ++v) {
    const size_t first = begin + static_cast<size_t>(v) * kNumThreads * kNumel;
    num[v] = first >= numel ? 0 : numel - first < kNumel ? static_cast<int>(numel - first) : kNumel;
    if (num[v] > 0) operation.load(first, num[v], loaded[v]);
  }
  int found = 0;
#pragma unroll
  for (int v = 0; v < kNumVectors; ++v) {
    const size_t first = begin + static_cast<size_t>(v) * kNumThreads * kNumel;
    if (num[v] > 0) found += operation.store(first, num[v], loaded[v]);
  }
  if constexpr (Operation::kCounts) {
    if (operation.count != nullptr) add_to_count(found, operation.count);
  }
}

template <typename Operation>
void launch_elementwise(const char* name, Stream stream, const Operation& operation, size_t numel) {
  launch(name, stream, ceil_div(numel, size_t{kNumVectors} * kNumThreads * Operation::kNumel),
         elementwise_kernel<Operation>, operation, numel);
}

}  // namespace bagua::kernels::cuda

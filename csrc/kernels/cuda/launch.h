// How kernels are launched, and what all of them share: 256 threads in a block but where a kernel says otherwise, one
// shared structure.
//
// Only names of the CUDA runtime and its device functions are used, no <<<>>>: the tests compile these files for the
// host, with a cuda_runtime.h of their own that runs threads as fibres.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <type_traits>

#include "csrc/common/device.h"
#include "csrc/common/error.h"
#include "csrc/device/cuda/check.h"
#include "csrc/device/cuda/device_scope.h"

namespace bagua::kernels::cuda {

inline constexpr int kWarpNumThreads = 32;
inline constexpr int kNumThreads = 256;
inline constexpr int kNumWarps = kNumThreads / kWarpNumThreads;
inline constexpr unsigned kAllLanes = 0xffffffffu;

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Throws unless `status`, which a launch or a copy of the kernel `name` returned, is success.
inline void check(cudaError_t status, const char* name, Stream stream) {
  if (status != cudaSuccess) device::cuda::check(status, std::string(name) + " on " + device_name(stream.device));
}

// Enqueues `kernel` with `num_blocks` blocks of `kBlockThreads`; none is legal.
template <int kBlockThreads = kNumThreads, typename... Parameters>
void launch(const char* name, Stream stream, size_t num_blocks, void (*kernel)(Parameters...),
            std::type_identity_t<Parameters>... arguments) {
  if (num_blocks == 0) return;
  const device::cuda::DeviceScope scope(stream.device.index);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(kBlockThreads);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name, stream);
}

// Enqueues a copy within the stream's device; no bytes are legal.
inline void launch_copy(const char* name, Stream stream, void* to, const void* from, size_t num_bytes) {
  if (num_bytes == 0) return;
  const device::cuda::DeviceScope scope(stream.device.index);
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)), name,
        stream);
}

#if defined(__CUDACC__)
// The one structure that the threads of a block share; undefined when the kernel starts.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ T shared;
  return shared;
}
#else
template <typename T>
T& shared_memory() {
  return *static_cast<T*>(emulated_shared_memory(sizeof(T)));
}
#endif

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kWarpNumThreads); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / kWarpNumThreads); }

}  // namespace bagua::kernels::cuda

// CUDA's runtime and device functions as far as csrc/kernels/cuda uses them, for the host compiler: tests that include
// a .cu file find this header instead of CUDA's and run the kernel with a fibre per thread (emulated_cuda.cc).
//
// The threads of a block take turns in an order that changes from block to block, and a thread runs until it waits for
// others. Waiting at different places of the source, or for threads that have ended, is an error, as it is on the GPU
// where nothing says so. Shared memory holds garbage when a block starts, and ends at a page that faults. Launches run
// before they return.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned of_x = 1) : x(of_x) {}
};

// Like CUDA's, they may lie over elements of another type.
struct __attribute__((may_alias)) uint1 {
  unsigned x;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
  unsigned x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorStubLibrary = 34,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorSystemDriverMismatch = 803,
  cudaErrorCompatNotSupportedOnDevice = 804,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
#define CUDART_VERSION 13000
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

extern dim3 threadIdx, blockIdx;  // of the fibre that runs

namespace cuda_emulation {

// Calls `thread` once per thread of the grid. Throws std::logic_error where threads wait for one another in vain.
void run_grid(unsigned num_blocks, unsigned num_threads, const std::function<void()>& thread);

enum class Waits { kForBlock, kForWarp };
// Until all threads of the block, or the lanes of the warp that `mask` names, are at `site`. Returns the values that
// the lanes of the warp came with, where they were what was waited for.
const uint64_t* meet(Waits waits, unsigned mask, uint64_t value, const std::source_location& site);

struct Counters {
  size_t num_launches = 0, num_copies = 0;
  std::vector<int> devices = {0};        // the current one is the last, before it those that wait for their scope's end
  int launched_on = -1;                  // which one was at the last launch or copy
  cudaStream_t launched_in = nullptr;    // the stream of that
  cudaError_t next_error = cudaSuccess;  // of the next launch or copy, which then does nothing
};
extern Counters counters;

cudaError_t begin_operation(size_t& count, cudaStream_t stream);
int lane();

template <typename T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Like the GPU, it gives the own value where there is no such lane.
template <typename T>
T shuffle(unsigned mask, T value, int from, const std::source_location& site) {
  const uint64_t* values = meet(Waits::kForWarp, mask, bits_of(value), site);
  return from < 0 || from >= 32 ? value : value_of<T>(values[from]);
}

template <typename T, typename Combine>
T reduce(unsigned mask, T value, Combine combine, const std::source_location& site) {
  const uint64_t* values = meet(Waits::kForWarp, mask, bits_of(value), site);
  bool is_first = true;
  T result{};
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    const T next = value_of<T>(values[lane]);
    result = is_first ? next : combine(result, next);
    is_first = false;
  }
  return result;
}

}  // namespace cuda_emulation

// An error, as on the GPU, where a thread moves `num_bytes` at once from or to an address that is not aligned to them.
void emulated_expect_aligned(const void* address, size_t num_bytes);

// The block's: `num_bytes` is the same for all threads of it.
void* emulated_shared_memory(size_t num_bytes);

// ---- device functions -----------------------------------------------------------------------------------
using EmulatedSite = std::source_location;

inline void __syncthreads(EmulatedSite site = EmulatedSite::current()) {
  cuda_emulation::meet(cuda_emulation::Waits::kForBlock, 0, 0, site);
}
int __syncthreads_or(int predicate, EmulatedSite site = EmulatedSite::current());

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::shuffle(mask, value, lane & 31, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::shuffle(mask, value, cuda_emulation::lane() ^ lane_mask, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::shuffle(mask, value, cuda_emulation::lane() - distance, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::shuffle(mask, value, cuda_emulation::lane() + distance, site);
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::reduce(
      mask, value, [](T a, T b) { return a < b ? a : b; }, site);
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::reduce(
      mask, value, [](T a, T b) { return a > b ? a : b; }, site);
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::reduce(
      mask, value, [](T a, T b) { return a + b; }, site);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, EmulatedSite site = EmulatedSite::current()) {
  return cuda_emulation::reduce(
      mask, value, [](unsigned a, unsigned b) { return a & b; }, site);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, EmulatedSite site = EmulatedSite::current()) {
  const unsigned bit = predicate ? 1u << cuda_emulation::lane() : 0;
  return cuda_emulation::reduce(
      mask, bit, [](unsigned a, unsigned b) { return a | b; }, site);
}

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T atomicOr(T* address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
// Four bytes of the eight of `a`, the lower ones, and `b`: which ones, four bits of `selector` say.
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  }
  return result;
}

// ---- runtime functions ----------------------------------------------------------------------------------
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorLaunchFailure"; }
inline const char* cudaGetErrorString(cudaError_t) { return "unspecified launch failure"; }
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const cudaError_t error = cuda_emulation::begin_operation(cuda_emulation::counters.num_launches, config->stream);
  if (error != cudaSuccess) return error;
  cuda_emulation::run_grid(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  const cudaError_t error = cuda_emulation::begin_operation(cuda_emulation::counters.num_copies, stream);
  if (error == cudaSuccess) std::memcpy(to, from, num_bytes);
  return error;
}

// Measures which actions of a program block another thread's work on the device, while the program's stream waits for a
// value that the other thread sets; see waiting_streams.py. Prints one line per case: the program's action, the other
// thread's, and the milliseconds until the latter was done on the device; -1: not until the stream resumed.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHeadStart{10}, kPatience{300};
constexpr size_t kBytes = 8 << 20;

void check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

// The first launch of a kernel loads its code, so there are several kernels, each to be launched first once.
template <int kIndex>
__global__ void kernel(float* x) {
  x[threadIdx.x] = x[threadIdx.x] * kIndex + 1;
}
using Kernel = void (*)(float*);
template <int... kIndices>
std::vector<Kernel> make_kernels(std::integer_sequence<int, kIndices...>) {
  return {kernel<kIndices>...};
}

struct Call {
  std::string name;
  std::function<void()> prepare, run;
};

}  // namespace

int main() {
  CHECK(cudaSetDevice(0));
  decltype(&cuStreamWaitValue32) wait_value = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", reinterpret_cast<void**>(&wait_value), 12000,
                                         cudaEnableDefault, &found));
  volatile unsigned* value = nullptr;
  void* value_on_device = nullptr;
  CHECK(cudaHostAlloc(const_cast<unsigned**>(&value), sizeof *value, cudaHostAllocMapped));
  CHECK(cudaHostGetDevicePointer(&value_on_device, const_cast<unsigned*>(value), 0));
  float *x = nullptr, *y = nullptr, *pinned = nullptr;
  CHECK(cudaMalloc(&x, kBytes));
  CHECK(cudaMalloc(&y, kBytes));
  CHECK(cudaHostAlloc(&pinned, kBytes, 0));
  std::vector<char> pageable(kBytes);
  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t const program = nullptr;  // the default stream, as torch uses
  cudaStream_t other = nullptr;          // created as the core creates its streams
  CHECK(cudaStreamCreateWithPriority(&other, cudaStreamNonBlocking, greatest));
  cudaEvent_t event = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

  const auto kernels = make_kernels(std::make_integer_sequence<int, 100>());
  size_t num_launched = 0;
  const auto launch_first = [&](float* on, cudaStream_t stream) {
    if (num_launched == kernels.size()) std::abort();
    kernels[num_launched++]<<<1, 32, 0, stream>>>(on);
  };
  const auto launch = [&](float* on, cudaStream_t stream) { kernels[0]<<<1, 32, 0, stream>>>(on); };
  launch_first(x, other);
  CHECK(cudaDeviceSynchronize());

  void* memory = nullptr;
  const auto nothing = [] {};
  const std::vector<Call> programs = {
      {"nothing", nothing, nothing},
      {"first launch of a kernel", nothing, [&] { launch_first(y, program); }},
      {"4000 launches", nothing,
       [&] {
         for (int i = 0; i < 4000; ++i) launch(y, program);
       }},
      {"copy of 4 bytes to pageable memory", nothing,
       [&] {
         CHECK(cudaMemcpyAsync(pageable.data(), y, 4, cudaMemcpyDeviceToHost, program));
         CHECK(cudaStreamSynchronize(program));
       }},
      {"copy of 8 MB to pageable memory", nothing,
       [&] { CHECK(cudaMemcpyAsync(pageable.data(), y, kBytes, cudaMemcpyDeviceToHost, program)); }},
      {"copy of 8 MB from pageable memory", nothing,
       [&] { CHECK(cudaMemcpyAsync(y, pageable.data(), kBytes, cudaMemcpyHostToDevice, program)); }},
      {"cudaFree", [&] { CHECK(cudaMalloc(&memory, kBytes)); }, [&] { CHECK(cudaFree(memory)); }},
      {"cudaFreeHost", [&] { CHECK(cudaHostAlloc(&memory, kBytes, 0)); }, [&] { CHECK(cudaFreeHost(memory)); }},
      {"cudaStreamSynchronize", nothing, [&] { CHECK(cudaStreamSynchronize(program)); }},
      {"cudaDeviceSynchronize", nothing, [&] { CHECK(cudaDeviceSynchronize()); }},
  };
  const std::vector<Call> others = {
      {"query of an event", [&] { CHECK(cudaEventRecord(event, other)); }, nothing},
      {"copies", nothing,
       [&] {
         CHECK(cudaMemcpyAsync(pinned, x, kBytes, cudaMemcpyDeviceToHost, other));
         CHECK(cudaMemcpyAsync(x, pinned, kBytes, cudaMemcpyHostToDevice, other));
         CHECK(cudaEventRecord(event, other));
       }},
      {"launch", nothing,
       [&] {
         launch(x, other);
         CHECK(cudaEventRecord(event, other));
       }},
      {"first launch", nothing,
       [&] {
         launch_first(x, other);
         CHECK(cudaEventRecord(event, other));
       }},
  };
  for (const Call& of_program : programs) {
    for (const Call& of_other : others) {
      *value = 0;
      of_program.prepare();
      of_other.prepare();
      CHECK(cudaDeviceSynchronize());
      if (wait_value(program, reinterpret_cast<CUdeviceptr>(value_on_device), 1, CU_STREAM_WAIT_VALUE_GEQ) != 0) {
        std::fprintf(stderr, "cuStreamWaitValue32 fails\n");
        return 1;
      }
      std::atomic<bool> is_done{false};
      std::thread first([&] { of_program.run(); });
      std::this_thread::sleep_for(kHeadStart);
      const auto begin = Clock::now();
      Clock::time_point end;
      std::thread second([&] {
        of_other.run();
        while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
        end = Clock::now();
        is_done = true;
      });
      while (!is_done && Clock::now() - begin < kPatience) std::this_thread::sleep_for(milliseconds(1));
      const bool was_done = is_done;
      *value = 1;
      first.join();
      second.join();
      CHECK(cudaDeviceSynchronize());
      const double took = std::chrono::duration<double, std::milli>(end - begin).count();
      std::printf("%s\t%s\t%.2f\n", of_program.name.c_str(), of_other.name.c_str(), was_done ? took : -1.0);
    }
  }
  return 0;
}

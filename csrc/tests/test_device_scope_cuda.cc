// Tests of the contexts that csrc/device/cuda/device_scope.cc makes, and what it leaves to the thread, over a driver
// that only takes notes. A process of a rank that touches another one's GPU has a context of several hundred MB there.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/tests/emulated_cuda/cuda.h"
#include "csrc/tests/emulated_cuda/cuda_runtime.h"

struct CUctx_st {
  int device;
};

namespace {

constexpr int kNumGpus = 4;
CUctx_st contexts[kNumGpus] = {{0}, {1}, {2}, {3}};
std::vector<int> made;                        // GPUs that have a context, in that order
thread_local std::vector<CUcontext> current;  // the last one is
thread_local int capture_mode = cudaStreamCaptureModeGlobal;

CUcontext make(int device) {
  if (std::find(made.begin(), made.end(), device) == made.end()) made.push_back(device);
  return &contexts[device];
}

CUresult get_current(CUcontext* found) {
  *found = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* popped) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *popped = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice device) {
  *context = make(device);
  return CUDA_SUCCESS;
}

}  // namespace

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr unsigned cudaEnableDefault = 0;
static cudaError_t cudaGetDeviceCount(int* count) {
  *count = kNumGpus;
  return cudaSuccess;
}
static cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned,
                                                    cudaDriverEntryPointQueryResult* result) {
  const std::string name = symbol;
  *found = name == "cuCtxGetCurrent"            ? reinterpret_cast<void*>(get_current)
           : name == "cuCtxPushCurrent"         ? reinterpret_cast<void*>(push)
           : name == "cuCtxPopCurrent"          ? reinterpret_cast<void*>(pop)
           : name == "cuDeviceGet"              ? reinterpret_cast<void*>(get_device)
           : name == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(retain)
                                                : nullptr;
  *result = *found == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
// The runtime makes a context on the first GPU where the thread has none.
static cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (current.empty()) current.push_back(make(0));
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}

// Under another name: a build with CUDA has its own.
#define cuda cuda_over_notes
#include "csrc/device/cuda/check.cc"
#include "csrc/device/cuda/device_scope.cc"
#undef cuda

namespace bagua {
namespace {

using device::cuda_over_notes::DeviceScope;

int current_gpu() { return current.empty() ? -1 : current.back()->device; }

void on_thread(const std::function<void()>& body) { std::thread(body).join(); }

TEST(DeviceScope, MakesAContextOnItsDeviceAloneAndLeavesAThreadThatHadNoneWithout) {
  on_thread([] {
    {
      const DeviceScope scope(2);
      EXPECT_EQ(current_gpu(), 2);
      EXPECT_EQ(capture_mode, cudaStreamCaptureModeRelaxed);
    }
    EXPECT_EQ(current_gpu(), -1);
    EXPECT_EQ(capture_mode, cudaStreamCaptureModeGlobal);
  });
  EXPECT_EQ(std::count(made.begin(), made.end(), 0), 0);
  EXPECT_EQ(std::count(made.begin(), made.end(), 2), 1);
}

TEST(DeviceScope, LeavesTheThreadsOwnDevice) {
  on_thread([] {
    push(make(1));
    {
      const DeviceScope scope(3);
      EXPECT_EQ(current_gpu(), 3);
      const DeviceScope inner(1), same(1);
      EXPECT_EQ(current_gpu(), 1);
      EXPECT_EQ(current.size(), 3u);  // of the same one nothing is pushed
    }
    EXPECT_EQ(current, std::vector<CUcontext>{&contexts[1]});
  });
}

TEST(DeviceScope, ADeviceThatIsNotThereIsNamed) {
  for (const int index : {-1, kNumGpus, 64}) {
    try {
      const DeviceScope scope(index);
      ADD_FAILURE() << index;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("there is no cuda:" + std::to_string(index) + ": CUDA sees 4 devices"),
                std::string::npos);
    }
  }
  EXPECT_EQ(current_gpu(), -1);
}

}  // namespace
}  // namespace bagua

// Contexts by way of the driver, whose functions the runtime finds: nothing is linked to it; see device_scope.h.
#include "csrc/device/cuda/device_scope.h"

#include <array>
#include <atomic>
#include <string>

#include <cuda.h>

#include "csrc/common/error.h"
#include "csrc/device/cuda/check.h"

namespace bagua::device::cuda {
namespace {

constexpr int kMaxDevices = 64;

template <typename Function>
void find(const char* name, Function** function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  // The signatures below are those of CUDA 12.0.
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result), name);
#endif
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string("the NVIDIA driver does not have ") + name + "; install a newer one");
  }
  *function = reinterpret_cast<Function*>(found);  // the driver's function of that name
}

struct Driver {
  CUresult (*get_current)(CUcontext*) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  CUresult (*get_device)(CUdevice*, int) = nullptr;
  CUresult (*retain)(CUcontext*, CUdevice) = nullptr;

  Driver() {
    find("cuCtxGetCurrent", &get_current);
    find("cuCtxPushCurrent", &push);
    find("cuCtxPopCurrent", &pop);
    find("cuDeviceGet", &get_device);
    find("cuDevicePrimaryCtxRetain", &retain);
  }
};

const Driver& driver() {
  static const Driver found;  // made again by the next caller if it throws
  return found;
}

void check_driver(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  if (status == CUDA_ERROR_NOT_INITIALIZED) check(cudaErrorInitializationError, call);
  throw Error(ErrorKind::kDevice, std::string(call) + " failed with CUresult " + std::to_string(status));
}

void check_index(int index) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (index >= 0 && index < count && index < kMaxDevices) return;
  throw Error(ErrorKind::kInvalidArgument, "there is no cuda:" + std::to_string(index) + ": CUDA sees " +
                                               std::to_string(count) + " devices; see CUDA_VISIBLE_DEVICES");
}

// Retained for the life of the process: torch does not release its own either.
CUcontext primary_context(int index) {
  static std::array<std::atomic<CUcontext>, kMaxDevices> contexts{};
  if (index < 0 || index >= kMaxDevices) check_index(index);
  std::atomic<CUcontext>& kept = contexts[static_cast<size_t>(index)];
  CUcontext context = kept.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  check_index(index);
  CUdevice device = 0;
  check_driver(driver().get_device(&device, index), "cuDeviceGet");
  check_driver(driver().retain(&context, device), "cuDevicePrimaryCtxRetain");
  kept.store(context, std::memory_order_release);  // of two threads both store the same one
  return context;
}

}  // namespace

int num_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (is_unavailable(status)) {
    (void)cudaGetLastError();
    return 0;
  }
  check(status, "cudaGetDeviceCount");
  return count;
}

DeviceScope::DeviceScope(int index) {
  const CUcontext wanted = primary_context(index);
  CUcontext current = nullptr;
  check_driver(driver().get_current(&current), "cuCtxGetCurrent");
  if (current != wanted) {
    check_driver(driver().push(wanted), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  if (cudaThreadExchangeStreamCaptureMode(&capture_mode_) != cudaSuccess) capture_mode_ = cudaStreamCaptureModeGlobal;
}

DeviceScope::~DeviceScope() {
  (void)cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  CUcontext popped = nullptr;
  if (is_pushed_) (void)driver().pop(&popped);
}

}  // namespace bagua::device::cuda

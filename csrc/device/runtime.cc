// The runtimes by kind of device; see runtime.h.
#include "csrc/device/runtime.h"

#include <array>
#include <atomic>
#include <string>

#include "csrc/common/error.h"

namespace bagua::device {
namespace {

std::atomic<Runtime*>& slot(DeviceKind kind) {
  static std::array<std::atomic<Runtime*>, kNumDeviceKinds> runtimes{};
  return runtimes[static_cast<size_t>(kind)];
}

}  // namespace

void Runtime::run(Stream stream, const char* name, std::function<void()>) {
  throw Error(ErrorKind::kInternal,
              std::string(name) + ": kernels of " + device_name(stream.device) + " do not run on the host");
}

void* Runtime::host_address(const void*) {
  throw Error(ErrorKind::kInternal, "this device's memory has no address on the host");
}

Runtime& runtime_of(Device device) {
  Runtime* runtime = slot(device.kind).load(std::memory_order_acquire);
  if (runtime != nullptr) return *runtime;
  if (device.kind == DeviceKind::kCuda) {
    throw Error(ErrorKind::kInvalidArgument,
                "tensors are on " + device_name(device) +
                    ", but this bagua was built without CUDA; move them to the CPU or install a build with CUDA "
                    "(BAGUA_CUDA=1)");
  }
  throw Error(ErrorKind::kInvalidArgument, "there is no runtime for " + device_name(device));
}

void register_runtime(DeviceKind kind, Runtime* runtime) { slot(kind).store(runtime, std::memory_order_release); }

bool has_runtime(DeviceKind kind) { return slot(kind).load(std::memory_order_acquire) != nullptr; }

}  // namespace bagua::device

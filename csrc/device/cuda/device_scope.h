// While one lives, its device is the thread's current one: what allocation, launches and the default stream go by.
//
// The device's primary context is pushed and popped, which leaves the thread as it was. cudaSetDevice() and back would
// not: a thread that never had a device would end with a context of several hundred MB on device 0.
//
// Calls in it may run while a stream is being captured into a CUDA graph, by this or by another thread
// (cudaStreamCaptureModeRelaxed): ours allocate nothing that the graph uses, and query no captured event.
#pragma once

#include <cuda_runtime_api.h>

namespace bagua::device::cuda {

// 0 where there is no driver or no GPU. Initialises the driver: a process that is to fork must not ask.
int num_devices();

class DeviceScope {
 public:
  // Throws InvalidArgument where CUDA or the device is missing.
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool is_pushed_ = false;
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;  // what it was before
};

}  // namespace bagua::device::cuda

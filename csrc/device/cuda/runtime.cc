// CUDA behind runtime.h, over the CUDA runtime that is linked in: the module loads without a driver, and says so when
// it is asked for a device.
//
// Memory comes from the device's default pool in the stream's order and goes back to the driver at the next
// synchronisation, so that torch's allocator can have it: what is needed again and again is kept by who needs it.
#include "csrc/device/runtime.h"

#include <atomic>
#include <string>

#include "csrc/common/error.h"
#include "csrc/device/cuda/check.h"
#include "csrc/device/cuda/device_scope.h"

namespace bagua::device {
namespace {

using cuda::check;
using cuda::DeviceScope;

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

[[noreturn]] void out_of_memory(size_t bytes, Device device) {
  (void)cudaGetLastError();
  size_t free_bytes = 0, total_bytes = 0;
  std::string state;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    state = ", " + std::to_string(free_bytes) + " bytes are free of " + std::to_string(total_bytes);
  }
  throw Error(ErrorKind::kDevice, device_name(device) + " is out of memory: asked for " + std::to_string(bytes) +
                                      " bytes" + state +
                                      "; use smaller batches or buckets, or torch.cuda.empty_cache()");
}

class CudaRuntime final : public Runtime {
 public:
  int num_devices() override { return cuda::num_devices(); }

  Description describe(int index) override {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    return {properties.name, properties.totalGlobalMem,
            "compute capability " + std::to_string(properties.major) + "." + std::to_string(properties.minor)};
  }

  std::string versions() override {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    return (driver == 0 ? std::string("no NVIDIA driver") : "driver for CUDA " + cuda::version_name(driver)) +
           ", CUDA runtime " + cuda::version_name(CUDART_VERSION) + " built in";
  }

  // "GPU-" and the UUID, as nvidia-smi shows it; of a MIG instance it is the instance's own.
  std::string device_id(Device device) override {
    const DeviceScope scope = scope_of(device);
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
    std::string id = "GPU-";
    for (size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
      if (i == 4 || i == 6 || i == 8 || i == 10) id += '-';
      const auto byte = static_cast<unsigned char>(properties.uuid.bytes[i]);
      id += "0123456789abcdef"[byte >> 4];
      id += "0123456789abcdef"[byte & 15];
    }
    return id;
  }

  // A MIG instance has that of its GPU.
  std::string bus_id(Device device) override {
    char id[32] = {};
    check(cudaDeviceGetPCIBusId(id, sizeof id, device.index), "cudaDeviceGetPCIBusId");
    return id;
  }

  void call_on(Device device, const std::function<void()>& call) override {
    const DeviceScope scope = scope_of(device);
    call();
  }

  void* allocate(size_t bytes, Stream stream) override {
    const DeviceScope scope = scope_of(stream.device);
    if (bytes == 0) return nullptr;
    void* memory = nullptr;
    const cudaError_t status = cudaMallocAsync(&memory, bytes, native(stream));
    if (status == cudaErrorMemoryAllocation) out_of_memory(bytes, stream.device);
    check(status, "cudaMallocAsync");
    return memory;
  }

  void free(void* memory, Stream stream) noexcept override {
    if (memory == nullptr) return;
    quietly(stream.device.index, [&] { return cudaFreeAsync(memory, native(stream)); });
  }

  // Portable: every device of the process sees it as pinned.
  void* allocate_pinned(size_t bytes) override {
    const DeviceScope scope(any_device());
    if (bytes == 0) return nullptr;
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      throw Error(ErrorKind::kDevice, "cannot pin " + std::to_string(bytes) +
                                          " bytes of the host's memory; raise `ulimit -l`, or use smaller buckets");
    }
    check(status, "cudaHostAlloc");
    return memory;
  }

  void free_pinned(void* memory) noexcept override {
    if (memory == nullptr) return;
    quietly(any_device(), [&] { return cudaFreeHost(memory); });
  }

  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    copy_async(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  }
  void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) override {
    copy_async(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  }
  void copy_from_host(void* to, const void* from, size_t bytes, Stream stream) override {
    copy_async(to, from, bytes, cudaMemcpyHostToDevice, stream);
  }

  void fill_zero(void* memory, size_t bytes, Stream stream) override {
    const DeviceScope scope = scope_of(stream.device);
    if (bytes == 0) return;
    check(cudaMemsetAsync(memory, 0, bytes, native(stream)), "cudaMemsetAsync");
  }

  // The stream has the highest priority: communication that waits for a free multiprocessor delays every rank.
  Stream create_stream(Device device) override {
    const DeviceScope scope = scope_of(device);
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return {device, stream};
  }

  void destroy_stream(Stream stream) noexcept override {
    quietly(stream.device.index, [&] { return cudaStreamDestroy(native(stream)); });
  }

  Event create_event(Device device) override { return create_event(device, cudaEventDisableTiming); }
  Event create_timing_event(Device device) override { return create_event(device, cudaEventDefault); }

  void destroy_event(Event event) noexcept override {
    quietly(any_device(), [&] { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); });
  }

  void record(Event event, Stream stream) override {
    const DeviceScope scope = scope_of(stream.device);
    refuse_capture(stream);
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream)), "cudaEventRecord");
  }

  bool is_done(Event event) override {
    const DeviceScope scope(any_device());
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(status, "cudaEventQuery");
    return true;
  }

  void wait(Stream stream, Event event) override {
    const DeviceScope scope = scope_of(stream.device);
    refuse_capture(stream);
    check(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
  }

  int64_t elapsed_ns(Event begin, Event end) override {
    const DeviceScope scope(any_device());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)),
          "cudaEventElapsedTime");
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

 private:
  Event create_event(Device device, unsigned flags) {
    const DeviceScope scope = scope_of(device);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    return event;
  }

  // An event would draw our streams into the capture, and the host's look at it would end that.
  static void refuse_capture(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) return;
    throw Error(ErrorKind::kInvalidArgument,
                "the current stream of " + device_name(stream.device) +
                    " is being captured into a CUDA graph, and communication cannot be part of one: its ranks agree by "
                    "way of the host. Communicate before or after the graph");
  }

  void copy_async(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream stream) {
    const DeviceScope scope = scope_of(stream.device);
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, bytes, kind, native(stream)), "cudaMemcpyAsync");
  }

  // A release that fails is not reported: the next call reports what is wrong with the device.
  template <typename Call>
  void quietly(int device_index, Call call) noexcept {
    try {
      const DeviceScope scope(device_index);
      if (call() != cudaSuccess) (void)cudaGetLastError();
    } catch (const Error&) {
    }
  }

  DeviceScope scope_of(Device device) {
    last_device_ = device.index;
    return DeviceScope(device.index);
  }

  // Some calls name no device: any context will do, but it should be one that the process has.
  int any_device() {
    int index = last_device_;
    if (index < 0 && cudaGetDevice(&index) != cudaSuccess) index = 0;
    return index;
  }

  std::atomic<int> last_device_{-1};  // -1: none was used yet
};

[[maybe_unused]] const bool registered = [] {
  register_runtime(DeviceKind::kCuda, new CudaRuntime);  // lives as long as the process
  return true;
}();

}  // namespace
}  // namespace bagua::device

// Ranks whose tensors lie on the emulated device, over any transport, each with an engine of its own.
#pragma once

#include "csrc/engine/engine.h"
#include "csrc/tests/emulated_device/emulated_runtime.h"
#include "csrc/tests/test_transport_pairs.h"
#include "csrc/transport/pinned/pinned_channel.h"

namespace bagua::testing {

// The one that the kernels find, from each call on: other tests have one of their own, and take it away again.
inline device::EmulatedRuntime& emulated() {
  static auto* const runtime = new device::EmulatedRuntime(/*num_devices=*/9, /*seed=*/7, 100us);
  device::register_runtime(DeviceKind::kEmulated, runtime);
  return *runtime;
}

// Ranks take turns with the first two devices, so that of three some share one.
inline Device device_of_rank(int rank) { return {DeviceKind::kEmulated, rank % 2}; }

// So that small tensors have many chunks, and the device computes what it can.
inline constexpr collectives::Thresholds kAllOnDevice{.on_host_bytes = 0, .device_chunk_scale = 1};

inline std::vector<std::unique_ptr<Engine>> make_device_engines(
    int size, const Kind& kind, const collectives::Thresholds& thresholds = kAllOnDevice) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(size, kind)) {
    communicator->set_device_channels([](Channel& host) { return std::make_unique<PinnedChannel>(host); });
    engines.push_back(std::make_unique<Engine>(std::move(communicator), thresholds));
  }
  return engines;
}

// A stream of the program's own, with pinned memory and device memory that it gives back at the end.
class DeviceUser {
 public:
  explicit DeviceUser(Device device) : runtime_(emulated()), stream_(runtime_.create_stream(device)) {}
  ~DeviceUser() {
    runtime_.synchronize(stream_);
    for (void* block : pinned_) runtime_.free_pinned(block);
    for (void* block : blocks_) runtime_.free(block, stream_);
    runtime_.destroy_stream(stream_);
  }
  DeviceUser(const DeviceUser&) = delete;
  DeviceUser& operator=(const DeviceUser&) = delete;

  Stream stream() const { return stream_; }
  uint8_t* allocate(size_t bytes) {
    blocks_.push_back(runtime_.allocate(std::max<size_t>(bytes, 1), stream_));
    return static_cast<uint8_t*>(blocks_.back());
  }
  // On the device once the stream has come so far.
  uint8_t* upload(const Bytes& values) {
    uint8_t* const there = allocate(values.size());
    if (!values.empty()) {
      uint8_t* const here = pinned(values.size());
      std::memcpy(here, values.data(), values.size());
      runtime_.copy_from_host(there, here, values.size(), stream_);
    }
    return there;
  }
  // Returns what the stream finds there.
  Bytes download(const void* there, size_t bytes) {
    if (bytes == 0) return {};
    uint8_t* const here = pinned(bytes);
    runtime_.copy_to_host(here, there, bytes, stream_);
    runtime_.synchronize(stream_);
    return {here, here + bytes};
  }
  Engine::Place ready() const { return {stream_.device, device::recorded_event(stream_)}; }
  // Waits as Work::wait of Python does: the stream goes on behind the operation. What the operation failed with, if it
  // did.
  std::optional<Error> wait(const std::shared_ptr<Work>& work, Clock::duration limit = 30s) {
    EXPECT_TRUE(work->wait_enqueued_for(limit)) << "an operation was not enqueued";
    work->let_wait(stream_);
    return work->error();
  }

 private:
  uint8_t* pinned(size_t bytes) {
    pinned_.push_back(runtime_.allocate_pinned(bytes));
    return static_cast<uint8_t*>(pinned_.back());
  }

  device::EmulatedRuntime& runtime_;
  const Stream stream_;
  std::vector<void*> pinned_;
  std::vector<void*> blocks_;
};

}  // namespace bagua::testing

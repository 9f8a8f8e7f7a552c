// A device that is not there, for the tests: kernels are the host's, everything else is as on a GPU. Its memory cannot
// be touched by the host (arena.h), its streams run late and in no order but the one that events make
// (stream_queue.h), copies from and to the host need pinned memory, and what CUDA would refuse is an error of kind
// Device: memory of another device, a destroyed stream, a range that reaches over a block's end.
//
// A failure inside a stream is sticky, as CUDA's are: every later call on that device throws it, its kernels and copies
// are skipped, events are reached. What only a bug does and no caller could handle (freed twice, pinned memory freed
// under a copy) ends the process with a message.
//
// A process that forked after the first use has no device in the child. Never part of bagua._C.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <sys/types.h>

#include "csrc/device/runtime.h"
#include "csrc/tests/emulated_device/arena.h"
#include "csrc/tests/emulated_device/stream_queue.h"

namespace bagua::device {

// Counts of all devices together.
struct EmulatedCounters {
  std::map<std::string, uint64_t> launches;  // by kernel, when launched
  uint64_t bytes_to_device = 0;              // copied, when enqueued
  uint64_t bytes_to_host = 0;
  uint64_t bytes_on_device = 0;
  uint64_t event_queries = 0;
  // The number that exists now; the host's order counts, so memory that the stream has yet to release is not live.
  size_t live_bytes = 0;
  size_t pinned_bytes = 0;
  int num_streams = 0;  // created and not destroyed; default streams do not count
  int num_events = 0;
};

class EmulatedRuntime final : public Runtime {
 public:
  static constexpr size_t kMemoryBytes = size_t{8} << 30;  // of each device, unless limited

  explicit EmulatedRuntime(int num_devices = 2, uint64_t seed = 0,
                           std::chrono::nanoseconds max_delay = std::chrono::microseconds(300));
  // Waits for all streams. The one of a process is never destroyed: its threads end with the process.
  ~EmulatedRuntime() override;

  int num_devices() override { return num_devices_; }
  Description describe(int index) override;
  std::string versions() override { return "no driver, and nothing to drive"; }
  std::string device_id(Device device) override;
  std::string bus_id(Device device) override;
  void call_on(Device device, const std::function<void()>& call) override;
  void* allocate(size_t bytes, Stream stream) override;
  void free(void* memory, Stream stream) noexcept override;
  void* allocate_pinned(size_t bytes) override;
  void free_pinned(void* memory) noexcept override;
  void copy(void* to, const void* from, size_t bytes, Stream stream) override;
  void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) override;
  void copy_from_host(void* to, const void* from, size_t bytes, Stream stream) override;
  void fill_zero(void* memory, size_t bytes, Stream stream) override;
  Stream create_stream(Device device) override;
  void destroy_stream(Stream stream) noexcept override;
  Event create_event(Device device) override;
  void destroy_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  bool is_done(Event event) override;
  void wait(Stream stream, Event event) override;
  Event create_timing_event(Device device) override;
  int64_t elapsed_ns(Event begin, Event end) override;
  void run(Stream stream, const char* name, std::function<void()> kernel) override;
  void* host_address(const void* device_address) override;

  // ---- what a framework needs besides ----------------------------------------------------------------------------
  // Runs in the stream's order, late, as cudaLaunchHostFunc: it is no kernel, so nothing counts it, and a failed device
  // runs it too. What it throws fails the device as `name`.
  void call(Stream stream, const char* name, std::function<void()> function);
  void synchronize(Stream stream);
  void synchronize(Device device);
  void synchronize(Event event);
  bool is_idle(Stream stream);
  bool is_of_another_process() const { return process_ != 0 && !is_own_process(); }  // a forked child's parent
  bool is_pinned(const void* memory);
  bool is_device_memory(const void* memory);
  Device device_of(const void* memory);  // throws Device
  Device current_device() const;         // of the calling thread: in call_on() its device, otherwise the first

  // ---- for tests -------------------------------------------------------------------------------------------------
  EmulatedCounters counters();
  void reset_counters();  // of launches, bytes and queries
  void set_delay(std::chrono::nanoseconds max_delay);
  void limit_memory(size_t bytes);  // of each device
  // The next kernel that is launched on the device reports a failure instead of running.
  void fail_next_kernel(int device_index);
  // Whether the devices are parts of one, as MIG instances are: bus_id() tells.
  void be_parts(bool are_parts) { are_parts_ = are_parts; }
  // Makes a device that failed usable again.
  void reset_errors();

 private:
  struct DeviceState;
  struct EventState;
  struct OwnStream {
    int device;
    std::shared_ptr<StreamQueue> queue;
  };
  struct PinnedBlock {
    size_t bytes;
    int num_copies = 0;  // that are enqueued and not done
  };

  void touch();  // makes the devices at the first use; throws Device in a forked child
  bool is_own_process() const;
  DeviceState& device_state(Device device);
  DeviceState& healthy(Device device);  // throws the device's sticky error
  DeviceState* owner_of(const void* memory);
  StreamQueue& queue_of(Stream stream);
  std::shared_ptr<EventState> event_of(Event event);
  Event create_event(Device device, bool is_timing);
  enum class OnFailure { kSkip, kRun };  // once the device has failed
  void enqueue_work(DeviceState& device, StreamQueue& queue, std::string name, std::function<void()> work,
                    OnFailure on_failure = OnFailure::kSkip);
  void pin(const void* memory, size_t bytes, const char* verb);
  void unpin(const void* memory);
  PinnedBlock* pinned_block_of(const void* memory, size_t* offset);
  std::vector<std::shared_ptr<StreamQueue>> destroyed_queues() const;

  const int num_devices_;
  const uint64_t seed_;
  std::atomic<int64_t> max_delay_ns_;
  std::atomic<bool> are_parts_{false};
  std::atomic<pid_t> process_{0};  // that has used the devices; 0: none yet

  std::mutex mutex_;  // guards the rest; is taken before the locks of arenas and queues
  std::vector<std::unique_ptr<DeviceState>> devices_;  // constant once process_ is set
  std::unordered_map<void*, OwnStream> streams_;       // by handle
  std::vector<std::weak_ptr<StreamQueue>> destroyed_;  // each lives while it is busy
  std::unordered_map<void*, std::shared_ptr<EventState>> events_;
  std::map<const char*, PinnedBlock> pinned_;
  EmulatedCounters counters_;
  size_t memory_limit_ = kMemoryBytes;
  uint64_t num_streams_made_ = 0;
};

}  // namespace bagua::device

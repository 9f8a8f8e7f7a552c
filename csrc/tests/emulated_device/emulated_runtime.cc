// The emulated device's checks, and what it enqueues; see emulated_runtime.h.
#include "csrc/tests/emulated_device/emulated_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include <unistd.h>

#include "csrc/tests/emulated_device/failures.h"

namespace bagua::device {
namespace {

using Start = StreamQueue::Start;
using Clock = std::chrono::steady_clock;

constexpr size_t kPinnedAlignment = 4096;

// The device whose kernel this thread is executing; -1: none.
thread_local int executing_device = -1;
thread_local int thread_device = 0;

std::string thread_name(int device, uint64_t stream) {
  return "emulated-" + std::to_string(device) + "." + std::to_string(stream);
}

}  // namespace

struct EmulatedRuntime::DeviceState {
  DeviceState(int device_index, uint64_t seed, const std::atomic<int64_t>& max_delay_ns)
      : index(device_index),
        name(device_name({DeviceKind::kEmulated, device_index})),
        arena(name),
        default_queue(thread_name(device_index, 0), seed, max_delay_ns) {}

  void report(const std::string& message) {
    std::lock_guard lock(error_mutex);
    if (!has_failed) error = name + ": " + message;  // the first cause stays
    has_failed = true;
  }
  void expect_healthy() {
    if (!has_failed.load(std::memory_order_acquire)) return;
    std::lock_guard lock(error_mutex);
    fail(error);
  }
  void reset_error() {
    std::lock_guard lock(error_mutex);
    has_failed = false;
  }

  const int index;
  const std::string name;
  Arena arena;
  size_t live_bytes = 0;           // guarded by the runtime's mutex_
  bool fails_next_kernel = false;  // as well
  std::mutex error_mutex;          // guards error
  std::string error;
  std::atomic<bool> has_failed{false};
  StreamQueue default_queue;  // last: its commands use the rest
};

struct EmulatedRuntime::EventState {
  // Whether a stream has come to a point that an event recorded, and when.
  struct Point {
    std::atomic<bool> is_reached{false};
    Clock::time_point time;  // written before is_reached

    void reach() {
      time = Clock::now();
      is_reached.store(true, std::memory_order_release);
      is_reached.notify_all();
    }
    void wait() const { is_reached.wait(false, std::memory_order_acquire); }
  };

  int device;
  bool is_timing;
  std::shared_ptr<Point> recorded;  // null until recorded; guarded by the runtime's mutex_
};

EmulatedRuntime::EmulatedRuntime(int num_devices, uint64_t seed, std::chrono::nanoseconds max_delay)
    : num_devices_(num_devices), seed_(seed), max_delay_ns_(max_delay.count()) {}

EmulatedRuntime::~EmulatedRuntime() {
  if (process_.load() != 0 && !is_own_process()) {
    // A forked child has neither the threads nor the right to the memory.
    for (auto& device : devices_) (void)device.release();
    for (auto& entry : streams_) new std::shared_ptr<StreamQueue>(entry.second.queue);
    return;
  }
  // A stream may wait for another one, so all close before one is joined; commands still use the devices.
  for (auto& entry : streams_) entry.second.queue->close();
  for (auto& device : devices_) device->default_queue.close();
  for (auto& device : devices_) device->default_queue.synchronize();
  streams_.clear();
  for (auto& queue : destroyed_queues()) queue->synchronize();
  for (auto& block : pinned_) std::free(const_cast<char*>(block.first));  // ours, from allocate_pinned()
}

bool EmulatedRuntime::is_own_process() const { return process_.load(std::memory_order_acquire) == getpid(); }

void EmulatedRuntime::touch() {
  const pid_t process = process_.load(std::memory_order_acquire);  // once: another thread may be setting it up
  if (process == getpid()) return;
  if (process != 0) {
    fail(
        "the emulated device was used before this process was forked, and cannot be used in the child; spawn the "
        "process, or use the device only after the fork");
  }
  std::lock_guard lock(mutex_);
  if (process_.load() != 0) return;
  for (int index = 0; index < num_devices_; ++index) {
    devices_.push_back(std::make_unique<DeviceState>(index, seed_ + static_cast<uint64_t>(index), max_delay_ns_));
  }
  num_streams_made_ = static_cast<uint64_t>(num_devices_);
  process_.store(getpid(), std::memory_order_release);
}

EmulatedRuntime::DeviceState& EmulatedRuntime::device_state(Device device) {
  if (device.kind != DeviceKind::kEmulated || device.index < 0 || device.index >= num_devices_) {
    throw Error(ErrorKind::kInvalidArgument, "there is no " + device_name(device) + ": the emulated devices are 0 to " +
                                                 std::to_string(num_devices_ - 1));
  }
  touch();
  return *devices_[static_cast<size_t>(device.index)];
}

EmulatedRuntime::DeviceState& EmulatedRuntime::healthy(Device device) {
  DeviceState& state = device_state(device);
  state.expect_healthy();
  return state;
}

EmulatedRuntime::DeviceState* EmulatedRuntime::owner_of(const void* memory) {
  touch();
  for (auto& device : devices_) {
    if (device->arena.contains(memory)) return device.get();
  }
  return nullptr;
}

StreamQueue& EmulatedRuntime::queue_of(Stream stream) {
  DeviceState& device = device_state(stream.device);
  if (stream.handle == nullptr) return device.default_queue;
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream.handle);
  if (found == streams_.end()) fail(hexadecimal(stream.handle) + " is no stream, or was destroyed");
  if (found->second.device != device.index) {
    fail("the stream is on emulated:" + std::to_string(found->second.device) + ", not on " + device.name);
  }
  return *found->second.queue;
}

std::shared_ptr<EmulatedRuntime::EventState> EmulatedRuntime::event_of(Event event) {
  touch();
  std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) fail(hexadecimal(event) + " is no event, or was destroyed");
  return found->second;
}

void EmulatedRuntime::enqueue_work(DeviceState& device, StreamQueue& queue, std::string name,
                                   std::function<void()> work, OnFailure on_failure) {
  queue.enqueue(
      [&device, name = std::move(name), work = std::move(work), on_failure] {
        if (device.has_failed && on_failure == OnFailure::kSkip) return;
        executing_device = device.index;
        try {
          work();
        } catch (const std::exception& error) {
          device.report(name + ": " + error.what());
        }
        executing_device = -1;
      },
      Start::kLate);
}

EmulatedRuntime::Description EmulatedRuntime::describe(int index) {
  DeviceState& device = device_state({DeviceKind::kEmulated, index});
  std::lock_guard lock(mutex_);
  return {"emulated device " + std::to_string(device.index), memory_limit_, "the host's"};
}

// ---- memory -------------------------------------------------------------------------------------------------------

void* EmulatedRuntime::allocate(size_t bytes, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  if (bytes == 0) return nullptr;
  {
    std::lock_guard lock(mutex_);
    if (bytes > memory_limit_ - std::min(memory_limit_, device.live_bytes)) {
      fail(device.name + " is out of memory: asked for " + std::to_string(bytes) + " bytes, " +
           std::to_string(device.live_bytes) + " bytes are in use of " + std::to_string(memory_limit_) +
           "; use smaller batches or buckets");
    }
    device.live_bytes += bytes;
    counters_.live_bytes += bytes;
  }
  void* memory = nullptr;
  try {
    memory = device.arena.reserve(bytes);
  } catch (...) {
    std::lock_guard lock(mutex_);
    device.live_bytes -= bytes;
    counters_.live_bytes -= bytes;
    throw;
  }
  queue.enqueue(
      [&device, memory] {
        try {
          device.arena.commit(memory);
        } catch (const std::exception& error) {
          device.report(error.what());
        }
      },
      Start::kNow);
  return memory;
}

void EmulatedRuntime::free(void* memory, Stream stream) noexcept {
  if (memory == nullptr || !is_own_process()) return;
  DeviceState* const device = owner_of(memory);
  if (device == nullptr) die("cannot free " + hexadecimal(memory) + ": it is no memory of the emulated device");
  StreamQueue* queue = nullptr;
  try {
    queue = &queue_of(stream);
  } catch (const std::exception& error) {
    die("cannot free " + hexadecimal(memory) + ": " + error.what());
  }
  if (device_state(stream.device).index != device->index) {
    die("cannot free memory of " + device->name + " on a stream of " + device_name(stream.device));
  }
  const size_t bytes = device->arena.mark_freed(memory);
  {
    std::lock_guard lock(mutex_);
    device->live_bytes -= bytes;
    counters_.live_bytes -= bytes;
  }
  queue->enqueue([device, memory] { device->arena.release(memory); }, Start::kNow);
}

void* EmulatedRuntime::allocate_pinned(size_t bytes) {
  touch();
  if (bytes == 0) return nullptr;
  const size_t rounded = (bytes + kPinnedAlignment - 1) / kPinnedAlignment * kPinnedAlignment;
  void* const memory = std::aligned_alloc(kPinnedAlignment, rounded);
  if (memory == nullptr) fail("cannot allocate " + std::to_string(bytes) + " bytes of pinned memory");
  std::memset(memory, 0xff, bytes);  // undefined, as the device's
  std::lock_guard lock(mutex_);
  pinned_.emplace(static_cast<const char*>(memory), PinnedBlock{bytes});
  counters_.pinned_bytes += bytes;
  return memory;
}

void EmulatedRuntime::free_pinned(void* memory) noexcept {
  if (memory == nullptr || !is_own_process()) return;
  {
    std::lock_guard lock(mutex_);
    const auto block = pinned_.find(static_cast<const char*>(memory));
    if (block == pinned_.end()) die("cannot free " + hexadecimal(memory) + ": no pinned memory begins there");
    if (block->second.num_copies > 0) {
      die("pinned memory at " + hexadecimal(memory) + " is freed while " + std::to_string(block->second.num_copies) +
          " copies still use it; wait for an event after the last one");
    }
    counters_.pinned_bytes -= block->second.bytes;
    pinned_.erase(block);
  }
  std::free(memory);
}

EmulatedRuntime::PinnedBlock* EmulatedRuntime::pinned_block_of(const void* memory, size_t* offset) {
  const char* const address = static_cast<const char*>(memory);
  auto block = pinned_.upper_bound(address);
  if (block == pinned_.begin()) return nullptr;
  --block;
  *offset = static_cast<size_t>(address - block->first);
  return *offset < block->second.bytes ? &block->second : nullptr;
}

// One more copy uses it.
void EmulatedRuntime::pin(const void* memory, size_t bytes, const char* verb) {
  std::lock_guard lock(mutex_);
  size_t offset = 0;
  PinnedBlock* const block = pinned_block_of(memory, &offset);
  if (block == nullptr) {
    fail(std::string(verb) + ": the host's memory at " + hexadecimal(memory) + " is not pinned; use allocate_pinned()");
  }
  if (bytes > block->bytes - offset) {
    fail(std::string(verb) + ": " + std::to_string(bytes) + " bytes reach over the end of the pinned block of " +
         std::to_string(block->bytes) + " bytes at byte " + std::to_string(offset));
  }
  ++block->num_copies;
}

void EmulatedRuntime::unpin(const void* memory) {
  std::lock_guard lock(mutex_);
  size_t offset = 0;
  --pinned_block_of(memory, &offset)->num_copies;  // free_pinned() has left it, because of this copy
}

// ---- copies -------------------------------------------------------------------------------------------------------

void EmulatedRuntime::copy(void* to, const void* from, size_t bytes, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  if (bytes == 0) return;
  DeviceState* const destination = owner_of(to);
  DeviceState* const source = owner_of(from);
  if (destination == nullptr || source == nullptr) {
    fail("copy: " + hexadecimal(destination == nullptr ? to : from) + " is no memory of an emulated device");
  }
  if (destination != &device && source != &device) {
    fail("copy: neither end is on the stream's device, " + device.name);
  }
  destination->arena.expect_valid(to, bytes);
  source->arena.expect_valid(from, bytes);
  const char* const first = static_cast<const char*>(std::min<const void*>(to, from));
  const char* const second = static_cast<const char*>(std::max<const void*>(to, from));
  if (static_cast<size_t>(second - first) < bytes) {
    fail("copy: " + std::to_string(bytes) + " bytes at " + hexadecimal(to) + " and " + hexadecimal(from) + " overlap");
  }
  {
    std::lock_guard lock(mutex_);
    counters_.bytes_on_device += bytes;
  }
  enqueue_work(device, queue, "copy", [=] {
    std::memcpy(destination->arena.host_address(to, bytes), source->arena.host_address(from, bytes), bytes);
  });
}

void EmulatedRuntime::copy_to_host(void* to, const void* from, size_t bytes, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  if (bytes == 0) return;
  device.arena.expect_valid(from, bytes);
  pin(to, bytes, "copy_to_host");
  {
    std::lock_guard lock(mutex_);
    counters_.bytes_to_host += bytes;
  }
  enqueue_work(device, queue, "copy_to_host",
               [=, &device] { std::memcpy(to, device.arena.host_address(from, bytes), bytes); });
  queue.enqueue([this, to] { unpin(to); }, Start::kNow);
}

void EmulatedRuntime::copy_from_host(void* to, const void* from, size_t bytes, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  if (bytes == 0) return;
  device.arena.expect_valid(to, bytes);
  pin(from, bytes, "copy_from_host");
  {
    std::lock_guard lock(mutex_);
    counters_.bytes_to_device += bytes;
  }
  enqueue_work(device, queue, "copy_from_host",
               [=, &device] { std::memcpy(device.arena.host_address(to, bytes), from, bytes); });
  queue.enqueue([this, from] { unpin(from); }, Start::kNow);
}

void EmulatedRuntime::fill_zero(void* memory, size_t bytes, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  if (bytes == 0) return;
  device.arena.expect_valid(memory, bytes);
  enqueue_work(device, queue, "fill_zero",
               [=, &device] { std::memset(device.arena.host_address(memory, bytes), 0, bytes); });
}

// ---- streams and events -------------------------------------------------------------------------------------------

Stream EmulatedRuntime::create_stream(Device device) {
  DeviceState& state = healthy(device);
  std::lock_guard lock(mutex_);
  const uint64_t number = num_streams_made_++;
  auto queue = std::make_shared<StreamQueue>(thread_name(state.index, number), seed_ + number, max_delay_ns_);
  void* const handle = queue.get();
  streams_.emplace(handle, OwnStream{state.index, std::move(queue)});
  ++counters_.num_streams;
  return {device, handle};
}

void EmulatedRuntime::destroy_stream(Stream stream) noexcept {
  if (!is_own_process()) return;
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream.handle);
  if (found == streams_.end()) die("cannot destroy " + hexadecimal(stream.handle) + ": it is no stream");
  std::erase_if(destroyed_, [](auto& queue) { return queue.expired(); });
  destroyed_.push_back(found->second.queue);
  StreamQueue::abandon(std::move(found->second.queue));
  streams_.erase(found);
  --counters_.num_streams;
}

// Those that are still busy. The lock is held, or no other thread is there.
std::vector<std::shared_ptr<StreamQueue>> EmulatedRuntime::destroyed_queues() const {
  std::vector<std::shared_ptr<StreamQueue>> queues;
  for (const auto& destroyed : destroyed_) {
    if (auto queue = destroyed.lock()) queues.push_back(std::move(queue));
  }
  return queues;
}

Event EmulatedRuntime::create_event(Device device) { return create_event(device, false); }
Event EmulatedRuntime::create_timing_event(Device device) { return create_event(device, true); }

Event EmulatedRuntime::create_event(Device device, bool is_timing) {
  DeviceState& state = healthy(device);
  auto event = std::make_shared<EventState>(EventState{state.index, is_timing, nullptr});
  std::lock_guard lock(mutex_);
  void* const handle = event.get();
  events_.emplace(handle, std::move(event));
  ++counters_.num_events;
  return handle;
}

void EmulatedRuntime::destroy_event(Event event) noexcept {
  if (!is_own_process()) return;
  std::lock_guard lock(mutex_);
  if (events_.erase(event) == 0) die("cannot destroy " + hexadecimal(event) + ": it is no event");
  --counters_.num_events;
}

void EmulatedRuntime::record(Event event, Stream stream) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  const auto state = event_of(event);
  if (state->device != device.index) {
    fail("the event is of emulated:" + std::to_string(state->device) + ", the stream that it is recorded on is of " +
         device.name);
  }
  auto point = std::make_shared<EventState::Point>();
  // Enqueued under the lock: of two threads that record the event, the one whose point stays comes last in the stream.
  std::lock_guard lock(mutex_);
  state->recorded = point;
  queue.enqueue([point = std::move(point)] { point->reach(); }, Start::kNow);
}

bool EmulatedRuntime::is_done(Event event) {
  const auto state = event_of(event);
  healthy({DeviceKind::kEmulated, state->device});
  std::lock_guard lock(mutex_);
  ++counters_.event_queries;
  return state->recorded == nullptr || state->recorded->is_reached.load(std::memory_order_acquire);
}

void EmulatedRuntime::wait(Stream stream, Event event) {
  healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  const auto state = event_of(event);
  healthy({DeviceKind::kEmulated, state->device});
  std::lock_guard lock(mutex_);
  if (state->recorded == nullptr) return;
  queue.enqueue([point = state->recorded] { point->wait(); }, Start::kNow);
}

int64_t EmulatedRuntime::elapsed_ns(Event begin, Event end) {
  const auto first = event_of(begin), second = event_of(end);
  healthy({DeviceKind::kEmulated, first->device});
  std::lock_guard lock(mutex_);
  if (first->device != second->device) fail("elapsed_ns: the events are of two devices");
  for (const auto& event : {first, second}) {
    if (!event->is_timing) fail("elapsed_ns: an event was not made by create_timing_event()");
    if (event->recorded == nullptr || !event->recorded->is_reached.load(std::memory_order_acquire)) {
      fail("elapsed_ns: an event was not recorded, or its stream has not come to it");
    }
  }
  // The clock is as precise as CUDA's.
  const std::chrono::duration<float, std::milli> elapsed(second->recorded->time - first->recorded->time);
  return static_cast<int64_t>(static_cast<double>(elapsed.count()) * 1e6);
}

void EmulatedRuntime::synchronize(Event event) {
  const auto state = event_of(event);
  std::shared_ptr<EventState::Point> point;
  {
    std::lock_guard lock(mutex_);
    point = state->recorded;
  }
  if (point != nullptr) point->wait();
  healthy({DeviceKind::kEmulated, state->device});
}

void EmulatedRuntime::synchronize(Stream stream) {
  queue_of(stream).synchronize();
  healthy(stream.device);
}

void EmulatedRuntime::synchronize(Device device) {
  DeviceState& state = device_state(device);
  std::vector<std::shared_ptr<StreamQueue>> queues;
  {
    std::lock_guard lock(mutex_);
    queues = destroyed_queues();
    for (auto& entry : streams_) {
      if (entry.second.device == state.index) queues.push_back(entry.second.queue);
    }
  }
  // Not under the lock: the end of a copy takes it.
  for (auto& queue : queues) queue->synchronize();
  state.default_queue.synchronize();
  state.expect_healthy();
}

bool EmulatedRuntime::is_idle(Stream stream) {
  healthy(stream.device);
  return queue_of(stream).is_idle();
}

// ---- kernels ------------------------------------------------------------------------------------------------------

void EmulatedRuntime::run(Stream stream, const char* name, std::function<void()> kernel) {
  DeviceState& device = healthy(stream.device);
  StreamQueue& queue = queue_of(stream);
  {
    std::lock_guard lock(mutex_);
    ++counters_.launches[name];
    if (std::exchange(device.fails_next_kernel, false)) {
      kernel = [] { fail("the kernel was told to fail"); };
    }
  }
  enqueue_work(device, queue, name, std::move(kernel));
}

void EmulatedRuntime::call(Stream stream, const char* name, std::function<void()> function) {
  enqueue_work(device_state(stream.device), queue_of(stream), name, std::move(function), OnFailure::kRun);
}

void* EmulatedRuntime::host_address(const void* device_address) {
  DeviceState* const device = owner_of(device_address);
  if (device == nullptr) fail(hexadecimal(device_address) + " is no memory of an emulated device");
  if (executing_device >= 0 && executing_device != device->index) {
    fail("a kernel of emulated:" + std::to_string(executing_device) + " uses memory of " + device->name);
  }
  return device->arena.host_address(device_address, 1);
}

// ---- questions, and what tests ask for ----------------------------------------------------------------------------

bool EmulatedRuntime::is_pinned(const void* memory) {
  if (!is_own_process()) return false;
  std::lock_guard lock(mutex_);
  size_t offset = 0;
  return pinned_block_of(memory, &offset) != nullptr;
}

bool EmulatedRuntime::is_device_memory(const void* memory) { return is_own_process() && owner_of(memory) != nullptr; }

std::string EmulatedRuntime::device_id(Device device) { return device_state(device).name; }

std::string EmulatedRuntime::bus_id(Device device) { return are_parts_ ? "emulated" : device_id(device); }

void EmulatedRuntime::call_on(Device device, const std::function<void()>& call) {
  struct Scope {
    const int before = thread_device;
    ~Scope() { thread_device = before; }
  } scope;
  thread_device = device_state(device).index;
  call();
}

Device EmulatedRuntime::current_device() const { return {DeviceKind::kEmulated, thread_device}; }

Device EmulatedRuntime::device_of(const void* memory) {
  DeviceState* const device = owner_of(memory);
  if (device == nullptr) fail(hexadecimal(memory) + " is no memory of an emulated device");
  return {DeviceKind::kEmulated, device->index};
}

EmulatedCounters EmulatedRuntime::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

void EmulatedRuntime::reset_counters() {
  std::lock_guard lock(mutex_);
  counters_.launches.clear();
  counters_.bytes_to_device = counters_.bytes_to_host = counters_.bytes_on_device = counters_.event_queries = 0;
}

void EmulatedRuntime::set_delay(std::chrono::nanoseconds max_delay) { max_delay_ns_ = max_delay.count(); }

void EmulatedRuntime::limit_memory(size_t bytes) {
  std::lock_guard lock(mutex_);
  memory_limit_ = bytes;
}

void EmulatedRuntime::fail_next_kernel(int device_index) {
  DeviceState& device = device_state({DeviceKind::kEmulated, device_index});
  std::lock_guard lock(mutex_);
  device.fails_next_kernel = true;
}

void EmulatedRuntime::reset_errors() {
  touch();
  for (auto& device : devices_) device->reset_error();
}

}  // namespace bagua::device

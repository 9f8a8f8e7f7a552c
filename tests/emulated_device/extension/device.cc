// Memory, streams, events, generators and the hooks by which torch finds them; see device.h.
#include "device.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

namespace emulated {
namespace {

using bagua::device::Event;

constexpr int kStreamsOfPool = 16;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kNumDevices> streams_of_thread{};

c10::Device resolved(c10::Device device) {
  const auto index = device.has_index() ? device.index() : device_of_thread;
  TORCH_CHECK(index >= 0 && index < kNumDevices, "there is no ", device, ": the emulated devices are 0 to ",
              kNumDevices - 1);
  return {kType, index};
}

bagua::Device native_device(c10::DeviceIndex index) { return {bagua::DeviceKind::kEmulated, index}; }

c10::Stream wrapped(bagua::Stream stream) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(stream.device.index)},
                     reinterpret_cast<c10::StreamId>(stream.handle));
}

// The streams of a device, created on request and kept, because torch copies a Stream without reporting its end.
class StreamPool {
 public:
  bagua::Stream next(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    auto& streams = streams_[static_cast<size_t>(device)];
    const size_t turn = next_[static_cast<size_t>(device)]++ % kStreamsOfPool;
    if (turn == streams.size()) streams.push_back(runtime().create_stream(native_device(device)));
    return streams[turn];
  }
  // The stream on which memory used by several streams is freed. It has no other work.
  bagua::Stream janitor(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    auto& stream = janitors_[static_cast<size_t>(device)];
    if (stream.handle == nullptr) stream = runtime().create_stream(native_device(device));
    return stream;
  }

 private:
  std::mutex mutex_;  // guards the rest
  std::array<std::vector<bagua::Stream>, kNumDevices> streams_;
  std::array<size_t, kNumDevices> next_{};
  std::array<bagua::Stream, kNumDevices> janitors_{};
};

StreamPool& pool() {
  static StreamPool& streams = *new StreamPool;
  return streams;
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  bagua::Stream stream;
  std::mutex mutex;                 // guards uses
  std::vector<bagua::Stream> uses;  // by streams other than `stream`
};

// Never throws, because a deleter cannot report errors. The next call reports a device's error again.
void delete_block(void* context) noexcept {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  bagua::Stream last = block->stream;
  if (!block->uses.empty() && !is_in_bad_fork()) {
    try {
      const bagua::Stream janitor = pool().janitor(static_cast<c10::DeviceIndex>(block->stream.device.index));
      wait_for(janitor, block->stream);
      for (const bagua::Stream& stream : block->uses) wait_for(janitor, stream);
      last = janitor;
    } catch (const std::exception&) {  // the device has failed, or a stream was destroyed
    }
  }
  runtime().free(block->memory, last);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_stream(-1);
    const c10::Device device = stream.device();
    if (bytes == 0) return {nullptr, nullptr, &delete_block, device};
    auto* const block = new Block{runtime().allocate(bytes, native(stream)), native(stream), {}, {}};
    return {block->memory, block, &delete_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the address does not name the block
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    runtime().copy(to, from, bytes, native(current_stream(-1)));
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_use(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(runtime().counters().live_bytes);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

DeviceMemory device_memory;
[[maybe_unused]] const bool allocator_registered = (c10::SetAllocator(kType, &device_memory), true);

// Freed once the copies that were enqueued from and to it are done, as torch's caching host allocator does.
struct PinnedBlock {
  void* memory;
  std::mutex mutex;  // guards uses
  std::vector<bagua::Stream> uses;
};

void delete_pinned(void* context) noexcept {
  const std::unique_ptr<PinnedBlock> block(static_cast<PinnedBlock*>(context));
  void* const memory = block->memory;
  if (block->uses.empty() || is_in_bad_fork()) return runtime().free_pinned(memory);
  try {
    const bagua::Stream janitor = pool().janitor(static_cast<c10::DeviceIndex>(block->uses[0].device.index));
    for (const bagua::Stream& stream : block->uses) wait_for(janitor, stream);
    runtime().call(janitor, "free_pinned", [memory] { runtime().free_pinned(memory); });
  } catch (const std::exception&) {  // the device has failed, so the memory may still be in use: leave it
  }
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &delete_pinned, c10::DeviceType::CPU};
    auto* const block = new PinnedBlock{runtime().allocate_pinned(bytes), {}, {}};
    return {block->memory, block, &delete_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

PinnedMemory pinned_memory;

// ---- generators ---------------------------------------------------------------------------------------------------

// A generator of the host with the device's type: operators run on the host, so the host's generator draws.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator drawing = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(drawing)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }

  at::Generator host;
};

// ---- the interface that torch calls -------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, device_of_thread}; }
  void setDevice(c10::Device device) const override { device_of_thread = resolved(device).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return is_in_bad_fork() ? 0 : kNumDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(resolved(device).index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolved(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return wrapped(pool().next(resolved(device).index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams_of_thread[static_cast<size_t>(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream).handle; }
  bool queryStream(const c10::Stream& stream) const override { return runtime().is_idle(native(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++num_host_waits();
    runtime().synchronize(native(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    ++num_host_waits();
    runtime().synchronize(native_device(resolved({kType, index}).index()));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "an event of device ", index,
                " cannot be recorded on a stream of device ", stream.device_index());
    if (*event == nullptr) {
      const auto device = native(stream).device;
      const bool is_timing = flag == c10::EventFlag::BACKEND_DEFAULT;  // torch.Event(enable_timing=True)
      *event = is_timing ? runtime().create_timing_event(device) : runtime().create_event(device);
    }
    runtime().record(*event, native(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) runtime().wait(native(stream), event);
  }
  bool queryEvent(void* event) const override { return event == nullptr || runtime().is_done(event); }
  void synchronizeEvent(void* event) const override {
    ++num_host_waits();
    if (event != nullptr) runtime().synchronize(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return static_cast<double>(runtime().elapsed_ns(begin, end)) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) runtime().destroy_event(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !is_in_bad_fork(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return is_in_bad_fork() ? 0 : kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_of_thread = resolved({kType, index}).index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = device_of_thread;
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void* memory) const override {
    return {kType, static_cast<c10::DeviceIndex>(runtime().device_of(memory).index)};
  }
  bool isPinnedPtr(const void* memory) const override { return runtime().is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::array<at::Generator, kNumDevices>& generators = *[] {
      auto* made = new std::array<at::Generator, kNumDevices>;
      for (int i = 0; i < kNumDevices; ++i) {
        (*made)[static_cast<size_t>(i)] = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i));
      }
      return made;
    }();
    return generators[static_cast<size_t>(resolved({kType, index}).index())];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(resolved({kType, index}).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

[[maybe_unused]] const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

std::atomic<uint64_t>& num_host_waits() {
  static std::atomic<uint64_t> count{0};
  return count;
}

bagua::device::EmulatedRuntime& runtime() {
  static auto& made = *new bagua::device::EmulatedRuntime(kNumDevices);
  return made;
}

c10::DeviceIndex current_device() { return device_of_thread; }

c10::Stream current_stream(c10::DeviceIndex device) {
  const c10::DeviceIndex index = device < 0 ? device_of_thread : device;
  return c10::Stream(c10::Stream::UNSAFE, {kType, index}, streams_of_thread[static_cast<size_t>(index)]);
}

bagua::Stream native(c10::Stream stream) {
  return {native_device(stream.device_index()), reinterpret_cast<void*>(stream.id())};
}

void wait_for(bagua::Stream waiting, bagua::Stream stream) {
  const Event event = runtime().create_event(stream.device);
  runtime().record(event, stream);
  runtime().wait(waiting, event);
  runtime().destroy_event(event);
}

c10::Allocator* allocator() { return &device_memory; }

void record_use(const c10::DataPtr& memory, c10::Stream stream) {
  const bagua::Stream used = native(stream);
  const auto add = [&](auto* block) {
    std::lock_guard lock(block->mutex);
    for (const bagua::Stream& known : block->uses) {
      if (known.device == used.device && known.handle == used.handle) return;
    }
    block->uses.push_back(used);
  };
  if (memory.get() == nullptr) return;
  if (memory.get_deleter() == &delete_block) {
    auto* const block = static_cast<Block*>(memory.get_context());
    if (block->stream.device == used.device && block->stream.handle == used.handle) return;
    add(block);
  } else if (memory.get_deleter() == &delete_pinned) {
    add(static_cast<PinnedBlock*>(memory.get_context()));
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::OptionalDeviceGuard guard(storage.device());
  c10::DataPtr memory = device_memory.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) runtime().copy(memory.get(), storage.data(), kept, native(current_stream(-1)));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

bool is_in_bad_fork() { return runtime().is_of_another_process(); }

at::Generator host_generator(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != kType) return generator;
  return generator.get<Generator>()->host;
}

}  // namespace emulated

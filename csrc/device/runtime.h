// The core's needs of a device, and nothing else: memory, copies, streams and events.
//
// One Runtime per kind serves all devices of that kind. The CPU has none: what runs there runs at once (memory.h).
// Everything that takes a stream is enqueued on it and returns at once; the host waits for nothing here. All methods
// may be called by any thread, and throw Error: InvalidArgument where the device or its driver is missing, Device where
// memory ends or the device reports a failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "csrc/common/device.h"

namespace bagua::device {

// A point in a stream's work, made by a Runtime.
using Event = void*;

class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual int num_devices() = 0;  // 0 where there is no driver
  // Texts about one of them, and about what drives them all, for people to read.
  struct Description {
    std::string name;
    size_t memory_bytes = 0;
    std::string architecture;
  };
  virtual Description describe(int index) = 0;
  virtual std::string versions() = 0;
  // The id of the physical device, or of the part of one that it is: two processes, or two hosts, that say the same
  // share it.
  virtual std::string device_id(Device device) = 0;
  // The address of the physical device in its host. Parts of one, which have ids of their own, say the same; so may
  // devices of two hosts.
  virtual std::string bus_id(Device device) { return device_id(device); }
  // Calls with the device as the thread's current one, which other libraries go by.
  virtual void call_on(Device device, const std::function<void()>& call) = 0;

  // Memory of the stream's device, aligned to 256 bytes, contents undefined, for what is enqueued on the stream from
  // here on. What is given back may be used by what the stream had to do before.
  virtual void* allocate(size_t bytes, Stream stream) = 0;
  virtual void free(void* memory, Stream stream) noexcept = 0;
  // Host memory that copies from and to the device move without a copy in between (page-locked). Give it back once no
  // copy uses it.
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void free_pinned(void* memory) noexcept = 0;

  // Bytes of device memory, which do not overlap; of pinned host memory where one end is the host.
  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void copy_from_host(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void fill_zero(void* memory, size_t bytes, Stream stream) = 0;

  // A stream of our own: it waits for no other one by itself, CUDA's default stream included. Give it back when its
  // work is done or need not be.
  virtual Stream create_stream(Device device) = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;

  virtual Event create_event(Device device) = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  // The event is what the stream has to do until now; recorded again, it is the later point.
  virtual void record(Event event, Stream stream) = 0;
  // Whether that is done; true of an event that was never recorded.
  virtual bool is_done(Event event) = 0;
  // Makes what is enqueued on `stream` from here on wait for what was last recorded. No-op if nothing was.
  virtual void wait(Stream stream, Event event) = 0;

  // An event that also says when the device came to it; others are faster to wait for.
  virtual Event create_timing_event(Device device) = 0;
  // From one to the other, by the device's clock; timing events of one device, both done. CUDA's resolution is half a
  // microsecond, and 24 bits of the distance: a millionth of a second for ten.
  virtual int64_t elapsed_ns(Event begin, Event end) = 0;

  // A device whose kernels are the host's (emulated) implements these: `kernel` runs in the stream's order and may
  // touch what host_address() gives it for the device's memory. `name` is counted.
  virtual void run(Stream stream, const char* name, std::function<void()> kernel);
  virtual void* host_address(const void* device_address);
};

// Returns that of the device's kind. Throws InvalidArgument where it is the CPU, or none is registered.
Runtime& runtime_of(Device device);
// CUDA's registers itself where it was built in, the emulated one is the tests'. `runtime` lives as long as the
// process.
void register_runtime(DeviceKind kind, Runtime* runtime);
bool has_runtime(DeviceKind kind);

}  // namespace bagua::device

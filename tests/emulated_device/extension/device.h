// The torch device "emulated" (PrivateUse1) over bagua's emulated runtime: declarations shared by this folder.
//
// Streams: torch's stream_id is the runtime's handle as an integer, 0 the default stream of its device, whose handle is
// null. Memory belongs to the stream that was current at its allocation, and is freed in that stream's order;
// record_stream() keeps it until the recorded streams have reached this point too.
#pragma once

#include <atomic>
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "csrc/device/emulated/emulated_runtime.h"

namespace at {
struct Generator;
}
namespace c10 {
struct Storage;
}

namespace emulated {

inline constexpr int kNumDevices = 4;
inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// Never destroyed: tensors outlive every static at exit.
bagua::device::EmulatedRuntime& runtime();
// The number of waits of the host for a device: by a copy, for a number, or explicitly. Waits of the CPU that computes
// operators do not count.
std::atomic<uint64_t>& num_host_waits();

c10::DeviceIndex current_device();
// The stream of the device; -1 means the current device.
c10::Stream current_stream(c10::DeviceIndex device);
bagua::Stream native(c10::Stream stream);

// Makes `waiting` wait for the present work of `stream`.
void wait_for(bagua::Stream waiting, bagua::Stream stream);

c10::Allocator* allocator();
// Keeps the memory until `stream` has done its present work, even if it is freed before. Has an effect on device memory
// and our pinned memory only.
void record_use(const c10::DataPtr& memory, c10::Stream stream);
// Resizes the storage to `bytes` bytes, and keeps its first ones.
void resize_storage(const c10::Storage& storage, size_t bytes);

// True in a forked child of a process that used the device.
bool is_in_bad_fork();

// The CPU generator that draws for a generator of this device.
at::Generator host_generator(const at::Generator& generator);

}  // namespace emulated

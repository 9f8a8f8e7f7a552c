// The torch device "emulated" (PrivateUse1) over bagua's emulated runtime: what the files of this folder share.
//
// Streams: torch's stream_id is the runtime's handle as an integer, 0 the default stream of its device, whose handle is
// null. Memory belongs to the stream that was current when it was allocated, and is freed in that stream's order;
// record_stream() lets it live until the recorded ones have come as far, too.
#pragma once

#include <atomic>
#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "csrc/tests/emulated_device/emulated_runtime.h"

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
// How often the host has been told to wait for a device: by a copy, for a number, or explicitly. That the CPU computes
// operators, and so waits for their operands, does not count.
std::atomic<uint64_t>& num_host_waits();

c10::DeviceIndex current_device();
// Of the device, -1: of the current one.
c10::Stream current_stream(c10::DeviceIndex device);
bagua::Stream native(c10::Stream stream);

// `waiting` waits for what `stream` has to do until now.
void wait_for(bagua::Stream waiting, bagua::Stream stream);

c10::Allocator* allocator();
// Keeps the memory until `stream` has done what it has to do until now, whoever frees it before. Device memory, or
// pinned memory of ours; of other memory nothing.
void record_use(const c10::DataPtr& memory, c10::Stream stream);
// The storage gets `bytes` bytes, of which the first ones are kept.
void resize_storage(const c10::Storage& storage, size_t bytes);

// Whether this is a forked child of a process that used the device.
bool is_in_bad_fork();

// The CPU generator that draws for a generator of this device.
at::Generator host_generator(const at::Generator& generator);

}  // namespace emulated

// Scratch memory that survives between operations, so that a step allocates nothing after the first: fresh
// large outputs cost a page fault per 4 KiB, which was measured to slow a codec down sevenfold.
// One per group and device, used by the group's worker thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "csrc/device/runtime.h"

namespace bagua {

class Workspace {
 public:
  static constexpr int kNumSlots = 9;

  // The memory is of the stream's device, for what is enqueued on that stream.
  Workspace() = default;
  explicit Workspace(Stream stream) : stream_(stream) {}
  ~Workspace() { clear(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // At least `bytes` bytes, 64-byte aligned, contents undefined. The same memory until a larger size is
  // asked of the same slot, which invalidates the earlier pointer.
  uint8_t* get(int slot, size_t bytes) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (s.bytes < bytes) {
      release(s);
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      s.data = allocate(rounded);
      s.bytes = rounded;
    }
    return s.data;
  }

  void clear() noexcept {
    for (Slot& slot : slots_) release(slot);
  }

  size_t total_bytes() const {
    size_t total = 0;
    for (const Slot& s : slots_) total += s.bytes;
    return total;
  }

 private:
  struct Slot {
    uint8_t* data = nullptr;
    size_t bytes = 0;
  };

  uint8_t* allocate(size_t bytes) {
    if (!stream_.is_cpu()) return static_cast<uint8_t*>(device::runtime_of(stream_.device).allocate(bytes, stream_));
    void* data = std::aligned_alloc(64, bytes);
    if (data == nullptr) throw std::bad_alloc();  // the engine names the rank
    return static_cast<uint8_t*>(data);
  }
  void release(Slot& slot) noexcept {
    uint8_t* const data = std::exchange(slot.data, nullptr);
    slot.bytes = 0;
    if (data == nullptr) return;
    if (stream_.is_cpu()) {
      std::free(data);
    } else {
      device::runtime_of(stream_.device).free(data, stream_);
    }
  }

  const Stream stream_;
  std::array<Slot, kNumSlots> slots_;
};

}  // namespace bagua

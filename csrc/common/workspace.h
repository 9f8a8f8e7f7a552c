// Scratch memory that survives between operations, so that a step allocates nothing after the first: fresh
// large outputs cost a page fault per 4 KiB, which was measured to slow a codec down sevenfold.
// One per group, used by its worker thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace bagua {

class Workspace {
 public:
  static constexpr int kNumSlots = 8;

  // At least `bytes` bytes, 64-byte aligned, contents undefined. The same memory until a larger size is
  // asked of the same slot, which invalidates the earlier pointer.
  uint8_t* get(int slot, size_t bytes) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (s.bytes < bytes) {
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      s.data.reset(static_cast<uint8_t*>(std::aligned_alloc(64, rounded)));
      if (!s.data) throw std::bad_alloc();
      s.bytes = rounded;
    }
    return s.data.get();
  }

  size_t total_bytes() const {
    size_t total = 0;
    for (const Slot& s : slots_) total += s.bytes;
    return total;
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  struct Slot {
    std::unique_ptr<uint8_t, Free> data;
    size_t bytes = 0;
  };
  std::array<Slot, kNumSlots> slots_;
};

}  // namespace bagua

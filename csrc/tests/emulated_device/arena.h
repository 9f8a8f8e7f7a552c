// The memory of one emulated device. It is mapped twice: at the addresses that are given out nothing can be touched, so
// that code of the host that does crashes, and a system call fails with EFAULT; kernels use the second mapping, by
// host_address().
//
// A block changes in two orders, as memory of cudaMallocAsync does: reserve() and mark_freed() are called by the host,
// commit() and release() by the stream. Between the two latter kernels may touch it, before and after that they crash
// too. Every block ends at the end of a page and an untouchable page follows; what is left of its pages holds a
// pattern, and release() finds a write there. Addresses are not used again before all others were. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace bagua::device {

class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kAddressSpace = size_t{1} << 36;  // of which only what is committed is memory

  explicit Arena(std::string name);  // of the device, for messages
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `bytes` > 0. Throws Device where the address space ends.
  void* reserve(size_t bytes);
  // Every byte is 0xff: NaN in all floating types, -1 in integers.
  void commit(void* memory);
  // Returns the block's bytes. Ends the process where `memory` is not the begin of a block, or was freed before.
  size_t mark_freed(void* memory);
  // Ends the process where bytes around the block were written.
  void release(void* memory);

  bool contains(const void* memory) const { return offset_of(memory) < kAddressSpace; }
  // Throws Device unless [memory, memory + bytes) lies in one block that is reserved and not marked as freed.
  void expect_valid(const void* memory, size_t bytes) const;
  // The address at which the host touches what the device has at `memory`. Throws Device unless all of it is committed.
  void* host_address(const void* memory, size_t bytes) const;

 private:
  struct Block {
    size_t bytes;   // as asked for
    size_t begin;   // offset of its first page
    size_t length;  // of its pages
    bool is_committed = false;
    bool is_freed = false;
  };
  using Blocks = std::map<size_t, Block>;  // by the offset that was given out

  size_t offset_of(const void* memory) const {  // of what lies elsewhere: kAddressSpace or more
    return static_cast<size_t>(static_cast<const char*>(memory) - device_);
  }
  size_t find_gap(size_t length) const;
  // The block that holds the range; throws Device.
  const Block& block_of(const void* memory, size_t bytes) const;
  Block& block_at(const void* memory, const char* verb);  // ends the process where none begins there
  std::string describe(const void* memory) const;

  const std::string name_;
  const size_t page_;
  char* device_ = nullptr;  // the untouchable mapping
  char* host_ = nullptr;

  mutable std::mutex mutex_;  // guards the rest
  Blocks blocks_;
  size_t next_ = 0;  // where the search for a gap begins
};

}  // namespace bagua::device

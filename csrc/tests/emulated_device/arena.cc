// The two mappings and the blocks in them; see arena.h.
#include "csrc/tests/emulated_device/arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include "csrc/tests/emulated_device/failures.h"

namespace bagua::device {
namespace {

constexpr int kUndefined = 0xff;
constexpr unsigned char kSlack = 0xa5;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool is_intact(const char* begin, const char* end) {
  return std::all_of(begin, end, [](char byte) { return static_cast<unsigned char>(byte) == kSlack; });
}

}  // namespace

Arena::Arena(std::string name) : name_(std::move(name)), page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  const int fd = memfd_create("bagua-emulated", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(kAddressSpace)) != 0) {
    fail(name_ + ": cannot make its memory: " + std::strerror(errno));
  }
  void* mapped[2];
  for (void*& mapping : mapped) {
    mapping = mmap(nullptr, kAddressSpace, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapping == MAP_FAILED) fail(name_ + ": cannot map its memory: " + std::strerror(errno));
    madvise(mapping, kAddressSpace, MADV_DONTDUMP);
  }
  close(fd);
  device_ = static_cast<char*>(mapped[0]);
  host_ = static_cast<char*>(mapped[1]);
}

Arena::~Arena() {
  munmap(device_, kAddressSpace);
  munmap(host_, kAddressSpace);
}

void* Arena::reserve(size_t bytes) {
  if (bytes > kAddressSpace / 2) fail(name_ + " has no room for " + std::to_string(bytes) + " bytes");
  const size_t length = round_up(round_up(bytes, kAlignment), page_);
  std::lock_guard lock(mutex_);
  const size_t begin = find_gap(length + 2 * page_) + page_;
  next_ = begin + length;
  const size_t offset = begin + length - round_up(bytes, kAlignment);
  blocks_.emplace(offset, Block{bytes, begin, length});
  return device_ + offset;
}

size_t Arena::find_gap(size_t length) const {
  for (size_t from : {next_, size_t{0}}) {
    size_t gap = from;
    for (auto block = blocks_.lower_bound(from); block != blocks_.end(); ++block) {
      if (block->second.begin >= gap + length) break;
      gap = block->second.begin + block->second.length;
    }
    if (gap + length <= kAddressSpace) return gap;
  }
  fail(name_ + ": no gap of " + std::to_string(length) + " bytes is left among its addresses");
}

void Arena::commit(void* memory) {
  std::lock_guard lock(mutex_);
  Block& block = block_at(memory, "commit");
  char* const pages = host_ + block.begin;
  if (mprotect(pages, block.length, PROT_READ | PROT_WRITE) != 0) {
    fail(name_ + ": cannot commit " + std::to_string(block.length) + " bytes: " + std::strerror(errno));
  }
  std::memset(pages, kSlack, block.length);
  std::memset(host_ + offset_of(memory), kUndefined, block.bytes);
  block.is_committed = true;
}

size_t Arena::mark_freed(void* memory) {
  std::lock_guard lock(mutex_);
  Block& block = block_at(memory, "free");
  if (block.is_freed) die(name_ + ": " + describe(memory) + " is freed twice");
  block.is_freed = true;
  return block.bytes;
}

void Arena::release(void* memory) {
  std::lock_guard lock(mutex_);
  Block& block = block_at(memory, "release");
  const size_t offset = offset_of(memory);
  char* const pages = host_ + block.begin;
  if (block.is_committed) {
    if (!is_intact(pages, host_ + offset) || !is_intact(host_ + offset + block.bytes, pages + block.length)) {
      die(name_ + ": something wrote before or after " + describe(memory));
    }
    mprotect(pages, block.length, PROT_NONE);
    madvise(pages, block.length, MADV_REMOVE);  // gives the memory back to the system
  }
  blocks_.erase(offset);
}

void Arena::expect_valid(const void* memory, size_t bytes) const {
  std::lock_guard lock(mutex_);
  if (block_of(memory, bytes).is_freed) fail(name_ + ": " + describe(memory) + " is used after it was freed");
}

void* Arena::host_address(const void* memory, size_t bytes) const {
  std::lock_guard lock(mutex_);
  if (!block_of(memory, bytes).is_committed) {
    fail(name_ + ": " + describe(memory) +
         " is used before its allocation: another stream must wait for an event of the one that allocated");
  }
  return host_ + offset_of(memory);
}

const Arena::Block& Arena::block_of(const void* memory, size_t bytes) const {
  const size_t offset = offset_of(memory);
  auto block = blocks_.upper_bound(offset);
  if (!contains(memory) || block == blocks_.begin()) fail(describe(memory) + " is no live memory of " + name_);
  --block;
  if (offset - block->first >= block->second.bytes) fail(describe(memory) + " is no live memory of " + name_);
  if (bytes > block->second.bytes - (offset - block->first)) {
    fail(name_ + ": " + std::to_string(bytes) + " bytes at " + describe(memory) + " reach over the block's end");
  }
  return block->second;
}

Arena::Block& Arena::block_at(const void* memory, const char* verb) {
  auto block = blocks_.find(offset_of(memory));
  if (block == blocks_.end()) {
    die(std::string("cannot ") + verb + " " + hexadecimal(memory) + ": no live block of " + name_ + " begins there");
  }
  return block->second;
}

// "0x7f..40, byte 64 of a block of 1024 bytes". The lock is held.
std::string Arena::describe(const void* memory) const {
  const size_t offset = offset_of(memory);
  auto block = blocks_.upper_bound(offset);
  if (!contains(memory) || block == blocks_.begin()) return hexadecimal(memory);
  --block;
  if (offset - block->first >= block->second.bytes) return hexadecimal(memory);
  return hexadecimal(memory) + ", byte " + std::to_string(offset - block->first) + " of a block of " +
         std::to_string(block->second.bytes) + " bytes,";
}

}  // namespace bagua::device

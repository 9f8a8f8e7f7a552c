// The set of descriptors to close in a forked child; see fork_guard.h.
#include "csrc/common/fork_guard.h"

#include <array>
#include <cstddef>

#include <pthread.h>
#include <unistd.h>

namespace bagua {
namespace {

// One bit per descriptor number. No lock: the handler below runs while locks of other threads may be held for
// good. Linux allows a process at most this many unless its administrator raised fs.nr_open.
constexpr size_t kMaxDescriptors = 1 << 20;
constexpr size_t kWordBits = 64;

std::array<std::atomic<uint64_t>, kMaxDescriptors / kWordBits> open_descriptors;
std::atomic<size_t> words_used{0};
std::atomic<uint32_t> generation{0};

uint64_t bit_of(int fd) { return uint64_t{1} << (static_cast<size_t>(fd) % kWordBits); }
std::atomic<uint64_t>& word_of(int fd) { return open_descriptors[static_cast<size_t>(fd) / kWordBits]; }
bool is_tracked(int fd) { return fd >= 0 && static_cast<size_t>(fd) < kMaxDescriptors; }

// Async-signal-safe: loads, stores and close().
void close_inherited() {
  generation.fetch_add(1, std::memory_order_relaxed);
  const size_t count = words_used.load(std::memory_order_relaxed);
  for (size_t w = 0; w < count; ++w) {
    const uint64_t word = open_descriptors[w].exchange(0, std::memory_order_relaxed);
    for (size_t bit = 0; bit < kWordBits; ++bit) {
      if (word >> bit & 1) ::close(static_cast<int>(w * kWordBits + bit));
    }
  }
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, close_inherited);

}  // namespace

uint32_t process_generation() { return generation.load(std::memory_order_relaxed); }

Descriptor::Descriptor(int fd) : fd_(fd), generation_(process_generation()) {
  if (!is_tracked(fd)) return;
  word_of(fd).fetch_or(bit_of(fd), std::memory_order_relaxed);
  const size_t needed = static_cast<size_t>(fd) / kWordBits + 1;
  size_t used = words_used.load(std::memory_order_relaxed);
  while (used < needed && !words_used.compare_exchange_weak(used, needed, std::memory_order_relaxed)) {
  }
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this == &other) return *this;
  reset();
  fd_ = std::exchange(other.fd_, -1);
  generation_ = other.generation_;
  return *this;
}

void Descriptor::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || generation_ != process_generation()) return;
  if (is_tracked(fd)) word_of(fd).fetch_and(~bit_of(fd), std::memory_order_relaxed);
  ::close(fd);
}

}  // namespace bagua

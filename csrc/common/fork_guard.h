// A guard for what a forked child (a DataLoader worker, say) inherits from a rank and must not use.
//
// It must not keep the rank's connections open: the peers would take a killed rank for a living one until
// the child ends. So every descriptor of the core is a Descriptor, and a pthread_atfork handler closes them
// all in the child. And it must not use the rank's objects: the threads that serve them do not exist there,
// their locks may be held for good, and their descriptor numbers may be another owner's by now. So owners
// compare process_generation() with the one they were made in, and leave a parent's objects alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace bagua {

// 0 in the process that loaded the library, one more in every fork of a fork.
uint32_t process_generation();

// Owns one descriptor. Not synchronised.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept;

  // -1 when empty, and in a forked child, where it was closed.
  int get() const { return generation_ == process_generation() ? fd_ : -1; }
  void reset();

 private:
  int fd_ = -1;
  uint32_t generation_ = 0;
};

// A value of which every process has its own: the first call in a forked child makes a fresh one and abandons the
// parent's. It is never destroyed, because tensors and threads may outlive every static of this library at exit.
template <typename T>
class PerProcess {
 public:
  T& get() {
    const uint32_t generation = process_generation();
    Made* made = made_.load(std::memory_order_acquire);
    while (made == nullptr || made->generation != generation) {
      Made* fresh = new Made{generation, {}};
      if (made_.compare_exchange_strong(made, fresh, std::memory_order_acq_rel)) return fresh->value;
      delete fresh;  // another thread was faster; `made` is its
    }
    return made->value;
  }

 private:
  struct Made {
    uint32_t generation;
    T value;
  };
  std::atomic<Made*> made_{nullptr};
};

}  // namespace bagua

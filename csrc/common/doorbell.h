// Doorbell: where one worker thread sleeps and every thread that has something for it rings, also from other
// processes (the words live in a memfd that same-host peers map, unless there are none).
//
// Order: the sleeper sets `sleepers`, looks once more for work, then waits for `epoch` to change. The
// ringer publishes its work, then looks at `sleepers`. Both use sequentially consistent fences, so at
// least one of them sees the other; no ring is lost, and a ring that no thread waits for costs one load.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "csrc/common/fork_guard.h"

namespace bagua {

// The words as they lie in shared memory.
struct alignas(64) DoorbellWords {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

constexpr size_t kDoorbellBytes = 4096;  // of the memory that they lie in

void ring(DoorbellWords& words);

class Doorbell {
 public:
  explicit Doorbell(bool is_private = false);  // private: of this process alone, without a descriptor
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  void ring() { bagua::ring(*words_); }
  // Announces the intention to sleep; the caller must look for work once more before `sleep`.
  uint32_t prepare();
  void cancel();
  // Returns when rung since `prepare` returned `epoch`, or after `limit`. Withdraws the announcement.
  void sleep(uint32_t epoch, std::chrono::nanoseconds limit);

  int fd() const { return fd_.get(); }  // for handing to same-host peers; -1 of a private one
  void close_fd() { fd_.reset(); }      // none will come any more; the words stay, for who still rings
  DoorbellWords& words() { return *words_; }

 private:
  Descriptor fd_;
  std::unique_ptr<DoorbellWords> own_;  // of a private one
  DoorbellWords* words_ = nullptr;
};

}  // namespace bagua

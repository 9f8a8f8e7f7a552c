// Work: the handle of one submitted operation. Completed exactly once, by the thread that ran it; any
// thread may wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

#include "csrc/common/error.h"

namespace bagua {

class Work {
 public:
  explicit Work(uint64_t ticket) : ticket_(ticket) {}

  // Identifies the operation's events in the log.
  uint64_t ticket() const { return ticket_; }

  bool is_completed() const { return completed_.load(std::memory_order_acquire); }

  // False when `limit` passed first. Does not throw what the operation threw; see error().
  bool wait_for(std::chrono::nanoseconds limit) {
    if (is_completed()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return is_completed(); });
  }

  // Meaningful once completed.
  std::optional<Error> error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }
  // Blocks of this rank's input or reduced stripe that held a NaN or an Inf under a codec.
  uint64_t nonfinite_blocks() const { return nonfinite_blocks_.load(std::memory_order_relaxed); }

  void complete(uint64_t nonfinite_blocks) {
    nonfinite_blocks_.store(nonfinite_blocks, std::memory_order_relaxed);
    finish(std::nullopt);
  }
  void fail(const Error& error) { finish(error); }

 private:
  void finish(std::optional<Error> error) {
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      completed_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
  }

  const uint64_t ticket_;
  std::atomic<bool> completed_{false};
  std::atomic<uint64_t> nonfinite_blocks_{0};
  mutable std::mutex mutex_;  // guards error_
  std::condition_variable changed_;
  std::optional<Error> error_;
};

}  // namespace bagua

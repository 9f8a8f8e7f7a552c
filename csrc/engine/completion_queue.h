// CompletionQueue: the operations that have ended, in that order, for a thread that cares what follows from them. The
// thread that ends an operation only leaves a number here: it never waits for Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

namespace bagua {

class CompletionQueue {
 public:
  // [any thread]
  void push(uint64_t token) {
    {
      std::lock_guard lock(mutex_);
      tokens_.push_back(token);
    }
    changed_.notify_one();
  }

  // The oldest token; waits for one. Empty once the queue is closed and has none left.
  std::optional<uint64_t> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_closed_ || !tokens_.empty(); });
    if (tokens_.empty()) return std::nullopt;
    const uint64_t token = tokens_.front();
    tokens_.pop_front();
    return token;
  }

  void close() {
    {
      std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards the two below
  std::deque<uint64_t> tokens_;
  bool is_closed_ = false;
  std::condition_variable changed_;
};

}  // namespace bagua

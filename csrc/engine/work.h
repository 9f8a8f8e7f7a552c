// Work: the handle of one submitted operation. Completed exactly once, by the thread that ran it; any
// thread may wait, or leave a callback that the completing thread calls.
//
// An operation on a device is first enqueued: from then on its place in the device's work is known (done_event), and a
// stream can wait for it without the host. It is completed once the device has come to that place.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/device/event.h"

namespace bagua {

class Work {
 public:
  // The counts of all operations of an engine.
  struct Counts {
    std::atomic<int> waiters{0};  // threads that stand still for one
    // Submitted, and neither ended nor handed to a stream that waits for them. Lowered before the waiter of an
    // operation wakes up, so that it finds none if it closes the group.
    std::atomic<size_t> outstanding{0};
  };
  explicit Work(uint64_t ticket, std::shared_ptr<Counts> counts = nullptr)
      : ticket_(ticket), counts_(std::move(counts)) {
    if (counts_) counts_->outstanding.fetch_add(1, std::memory_order_relaxed);
  }

  // While it lives, a thread of the program stands still until the operation ends.
  class Waiter {
   public:
    explicit Waiter(Work& work) : work_(work) { work_.count_waiter(1); }
    ~Waiter() { work_.count_waiter(-1); }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

   private:
    Work& work_;
  };
  bool has_waiter() const { return num_waiters_.load(std::memory_order_relaxed) > 0; }

  // Identifies the operation's events in the log.
  uint64_t ticket() const { return ticket_; }

  bool is_completed() const { return completed_.load(std::memory_order_acquire); }

  // False when `limit` passed first. Does not throw what the operation threw; see error().
  bool wait_for(std::chrono::nanoseconds limit) {
    if (is_completed()) return true;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return is_completed(); });
  }

  // Returns false when `limit` passed before all of an operation on a device was enqueued, or it had ended.
  bool wait_enqueued_for(std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return done_event_ != nullptr || is_completed(); });
  }
  // Null before, and of an operation on the CPU. What is enqueued behind it finds the result.
  device::SharedEvent done_event() const {
    std::lock_guard lock(mutex_);
    return done_event_;
  }
  // The stream goes on behind what has been enqueued, even of an operation that failed since: a device that is late
  // still uses its tensors.
  void let_wait(Stream stream) {
    const device::SharedEvent done = done_event();
    if (done == nullptr) return;
    settle();
    try {
      done->let_wait(stream);
    } catch (const Error&) {
      if (!error()) throw;
    }
  }
  void set_enqueued(device::SharedEvent done) {
    std::vector<std::function<void()>> callbacks;
    {
      std::lock_guard lock(mutex_);
      done_event_ = std::move(done);
      callbacks.swap(enqueued_callbacks_);
    }
    changed_.notify_all();
    for (auto& callback : callbacks) callback();
  }

  // Meaningful once completed.
  std::optional<Error> error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }
  // Blocks of this rank's input or reduced stripe that held a NaN or an Inf under a codec.
  uint64_t nonfinite_blocks() const { return nonfinite_blocks_.load(std::memory_order_relaxed); }
  // Whether the result holds no NaN and no infinity, where the operation, of the CPU, was to look; equal on all ranks.
  std::optional<bool> is_result_finite() const {
    const int known = result_.load(std::memory_order_relaxed);
    return known == kNotLooked ? std::nullopt : std::optional<bool>(known == kFinite);
  }
  // Memory that the operation reads and writes lives in `kept`, until it has ended or let_go() has been called, whoever
  // lets go of this handle. `stream` is where that memory is used next. Not kept where the operation has ended already.
  void keep(std::shared_ptr<void> kept, Stream stream) {
    std::lock_guard lock(mutex_);
    if (is_completed() && !is_in_use_) return;
    kept_ = std::move(kept);
    reused_on_ = stream;
  }
  // Work that is enqueued on `stream` from now on stands behind the operation. So may what uses the memory next.
  void let_go(Stream stream) {
    std::lock_guard lock(mutex_);
    if (stream == reused_on_) kept_.reset();
  }

  // Called by the operation, before it completes.
  void set_result_finite(bool is_finite) { result_.store(is_finite ? kFinite : kNotFinite, std::memory_order_relaxed); }
  // Payload that this rank has sent for a collective: in all, and of it over a network instead of shared memory.
  // Meaningful once completed; 0 for one that failed.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t network_bytes_sent() const { return network_bytes_sent_.load(std::memory_order_relaxed); }

  // Calls `callback` once: now, on this thread, when the operation has ended; otherwise when it ends, on the thread
  // that ends it, after the waiters were woken. It must not throw. It is destroyed after its call, or with a Work that
  // never ended (in a forked child).
  void add_done_callback(std::function<void()> callback) {
    {
      std::lock_guard lock(mutex_);
      if (!is_completed()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  // The same for when all of an operation on a device has been enqueued, or it has ended before that; of one on the CPU
  // when it has ended.
  void add_enqueued_callback(std::function<void()> callback) {
    {
      std::lock_guard lock(mutex_);
      if (done_event_ == nullptr && !is_completed()) {
        enqueued_callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

  void complete(uint64_t nonfinite_blocks, uint64_t bytes_sent = 0, uint64_t network_bytes_sent = 0) {
    nonfinite_blocks_.store(nonfinite_blocks, std::memory_order_relaxed);
    bytes_sent_.store(bytes_sent, std::memory_order_relaxed);
    network_bytes_sent_.store(network_bytes_sent, std::memory_order_relaxed);
    finish(std::nullopt);
  }
  // `is_in_use`: a device may use what is kept still; call release() when it no longer does.
  void fail(const Error& error, bool is_in_use = false) { finish(error, is_in_use); }
  void release() {
    std::shared_ptr<void> kept;  // ends without the lock
    std::lock_guard lock(mutex_);
    is_in_use_ = false;
    kept.swap(kept_);
  }

 private:
  void count_waiter(int change) {
    num_waiters_.fetch_add(change, std::memory_order_relaxed);
    if (counts_) counts_->waiters.fetch_add(change, std::memory_order_relaxed);
  }

  void settle() {
    if (!is_settled_.exchange(true, std::memory_order_relaxed) && counts_) {
      counts_->outstanding.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  void finish(std::optional<Error> error, bool is_in_use = false) {
    std::vector<std::function<void()>> callbacks, enqueued_callbacks;
    settle();
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      is_in_use_ = is_in_use;
      if (!is_in_use) kept_.reset();  // before a waiter can know
      completed_.store(true, std::memory_order_release);
      callbacks.swap(callbacks_);
      enqueued_callbacks.swap(enqueued_callbacks_);
    }
    changed_.notify_all();
    for (auto& callback : enqueued_callbacks) callback();
    for (auto& callback : callbacks) callback();  // without the lock: a callback may ask for error()
  }

  enum Result : int { kNotLooked, kFinite, kNotFinite };

  const uint64_t ticket_;
  const std::shared_ptr<Counts> counts_;
  std::atomic<bool> is_settled_{false};  // ended, or handed to a stream
  std::atomic<int> num_waiters_{0};
  std::atomic<bool> completed_{false};
  std::atomic<uint64_t> nonfinite_blocks_{0};
  std::atomic<int> result_{kNotLooked};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> network_bytes_sent_{0};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<Error> error_;
  device::SharedEvent done_event_;
  std::vector<std::function<void()>> callbacks_, enqueued_callbacks_;
  std::shared_ptr<void> kept_;  // whose end takes no lock
  bool is_in_use_ = false;      // though the operation has failed
  Stream reused_on_;
};

}  // namespace bagua

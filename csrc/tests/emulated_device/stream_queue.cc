// The thread of a stream; see stream_queue.h.
#include "csrc/tests/emulated_device/stream_queue.h"

#include <chrono>
#include <utility>

#include <pthread.h>
#include <sys/prctl.h>

namespace bagua::device {

StreamQueue::StreamQueue(std::string name, uint64_t seed, const std::atomic<int64_t>& max_delay_ns)
    : name_(std::move(name)), max_delay_ns_(max_delay_ns), random_(seed) {}

StreamQueue::~StreamQueue() {
  close();
  if (thread_.joinable()) thread_.join();
}

void StreamQueue::enqueue(std::function<void()> command, Start start) {
  std::lock_guard lock(mutex_);
  commands_.push_back({std::move(command), start});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { execute_all(); });
  } else {
    changed_.notify_all();
  }
}

bool StreamQueue::is_idle() {
  std::lock_guard lock(mutex_);
  return commands_.empty() && !is_executing_;
}

void StreamQueue::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return commands_.empty() && !is_executing_; });
}

void StreamQueue::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

void StreamQueue::abandon(std::shared_ptr<StreamQueue> queue) {
  StreamQueue& left = *queue;
  std::lock_guard lock(left.mutex_);
  left.is_closed_ = true;
  if (!left.thread_.joinable()) return;
  left.thread_.detach();
  left.self_ = queue;
  left.changed_.notify_all();
}

void StreamQueue::execute_all() {
  std::shared_ptr<StreamQueue> self;  // outlives the lock
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  prctl(PR_SET_TIMERSLACK, 1);  // the default, 50 us, would lengthen every delay
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !commands_.empty() || is_closed_; });
    if (commands_.empty()) {
      self = std::move(self_);
      return;
    }
    Command command = std::move(commands_.front());
    commands_.pop_front();
    is_executing_ = true;
    lock.unlock();
    if (command.start == Start::kLate) sleep_for_a_while();
    command.execute();
    command.execute = nullptr;  // what it owned is gone before the stream is idle
    lock.lock();
    is_executing_ = false;
    if (commands_.empty()) changed_.notify_all();
  }
}

void StreamQueue::sleep_for_a_while() {
  const int64_t limit = max_delay_ns_.load(std::memory_order_relaxed);
  if (limit <= 0 || random_() % 2 == 0) return;
  std::this_thread::sleep_for(std::chrono::nanoseconds(random_() % static_cast<uint64_t>(limit)));
}

}  // namespace bagua::device

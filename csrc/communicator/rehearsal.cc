// The steps of rehearsed operations; see rehearsal.h.
#include "csrc/communicator/rehearsal.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

namespace bagua {
namespace {

int64_t processor_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

void Rehearsal::begin() {
  steps_.clear();
  sends_.clear();
  receives_.clear();
  busy_until_ns_ = processor_ns();
}

void Rehearsal::add(RehearsedStep step) {
  step.busy_ns = processor_ns() - busy_until_ns_;
  steps_.push_back(step);
}

void Rehearsal::post(bool is_send, int peer, void* data, size_t bytes, Request* request) {
  const uint64_t index = steps_.size();
  request->peer = peer;
  request->remaining.store(static_cast<uint32_t>(index), std::memory_order_relaxed);
  request->done.store(false, std::memory_order_relaxed);
  add({is_send ? RehearsedStep::kSend : RehearsedStep::kReceive, peer, bytes});
  (is_send ? sends_ : receives_).push_back({index, data, bytes});
  pair();
  busy_until_ns_ = processor_ns();
}

void Rehearsal::pair() {
  while (!sends_.empty() && !receives_.empty()) {
    const Message send = sends_.front(), receive = receives_.front();
    sends_.pop_front();
    receives_.pop_front();
    fill(receive, send.data, send.bytes);
    steps_[send.step].about = receive.step;
    steps_[receive.step].about = send.step;
  }
}

void Rehearsal::fill(const Message& receive, const void* data, size_t bytes) {
  const size_t common = std::min(receive.bytes, bytes);
  if (common > 0) std::memmove(receive.data, data, common);
  if (receive.bytes > common) std::memset(static_cast<char*>(receive.data) + common, 0, receive.bytes - common);
}

void Rehearsal::wait(Request& request) {
  const uint64_t message = request.remaining.load(std::memory_order_relaxed);
  add({RehearsedStep::kWait, request.peer, 0, message});
  // Its memory may be used again.
  const auto is_it = [message](const Message& one) { return one.step == message; };
  const auto receive = std::find_if(receives_.begin(), receives_.end(), is_it);
  if (receive != receives_.end()) {
    fill(*receive, receive->data, 0);
    receives_.erase(receive);
  }
  const auto send = std::find_if(sends_.begin(), sends_.end(), is_it);
  if (send != sends_.end()) sends_.erase(send);
  request.done.store(true, std::memory_order_release);
  busy_until_ns_ = processor_ns();
}

void Rehearsal::cancel() {
  sends_.clear();
  receives_.clear();
}

void Rehearsal::end() {
  add({});
  std::lock_guard lock(mutex_);
  operations_.push_back(std::exchange(steps_, {}));
}

Rehearsal::Steps Rehearsal::operation(size_t index) const {
  std::lock_guard lock(mutex_);
  return index < operations_.size() ? operations_[index] : Steps{};
}

}  // namespace bagua

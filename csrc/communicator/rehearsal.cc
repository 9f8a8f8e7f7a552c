// The steps of rehearsed operations; see rehearsal.h.
#include "csrc/communicator/rehearsal.h"

#include <ctime>

#include <cstring>
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

// Messages of unlike sizes stay without a partner, as those of a tree do.
void Rehearsal::pair() {
  while (!sends_.empty() && !receives_.empty()) {
    const Message send = sends_.front(), receive = receives_.front();
    sends_.pop_front();
    receives_.pop_front();
    if (send.bytes != receive.bytes) continue;
    if (send.bytes > 0) std::memmove(receive.data, send.data, send.bytes);
    steps_[send.step].about = receive.step;
    steps_[receive.step].about = send.step;
  }
}

void Rehearsal::wait(Request& request) {
  const uint64_t message = request.remaining.load(std::memory_order_relaxed);
  add({RehearsedStep::kWait, request.peer, 0, message});
  // Its memory may be used again.
  for (std::deque<Message>* unpaired : {&sends_, &receives_}) {
    for (auto it = unpaired->begin(); it != unpaired->end(); ++it) {
      if (it->step != message) continue;
      unpaired->erase(it);
      break;
    }
  }
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

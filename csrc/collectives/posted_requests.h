// PostedRequests: the sends and receives that an algorithm has under way, in numbered slots that it uses
// again and again. If an exception leaves the algorithm while some are not done, the destructor withdraws
// them (Communicator::cancel), so that no channel keeps a pointer into a dead stack frame or a freed buffer.
//
// Posts belong to a batch (Communicator::begin_batch), which ends before a wait for what is not done.
//
// An idle slot counts as done, so waiting for a slot that was not used (an empty range) is a no-op. Empty
// messages are not sent, since both ends know the size; a note is a message without bytes that is sent.
#pragma once

#include <cassert>
#include <exception>
#include <memory>

#include "csrc/communicator/group_view.h"

namespace bagua::collectives {

class PostedRequests {
 public:
  PostedRequests(const GroupView& group, size_t num_slots) : group_(group), num_slots_(num_slots), requests_(inline_) {
    if (num_slots > kNumInline) {
      large_ = std::make_unique<Request[]>(num_slots);
      requests_ = large_.get();
    }
    for (size_t i = 0; i < num_slots; ++i) requests_[i].done.store(true, std::memory_order_relaxed);
  }
  ~PostedRequests() {
    if (all_done()) return;
    assert(std::uncaught_exceptions() > 0 && "an algorithm returned before its messages were done");
    group_.cancel();
  }
  PostedRequests(const PostedRequests&) = delete;
  PostedRequests& operator=(const PostedRequests&) = delete;

  void send(size_t slot, int peer, const void* data, size_t bytes) {
    if (bytes > 0) group_.post_send(peer, data, bytes, claim_in_batch(slot));
  }
  void recv(size_t slot, int peer, void* data, size_t bytes) {
    if (bytes > 0) group_.post_recv(peer, data, bytes, claim_in_batch(slot));
  }
  void send_note(size_t slot, int peer) { group_.post_send(peer, nullptr, 0, claim(slot)); }
  void recv_note(size_t slot, int peer) { group_.post_recv(peer, nullptr, 0, claim(slot)); }

  void wait(size_t slot) {
    if (requests_[slot].done.load(std::memory_order_acquire)) return;
    group_.end_batch();
    group_.wait(requests_[slot]);
  }
  void wait_range(size_t begin, size_t end) {
    for (size_t slot = begin; slot < end; ++slot) wait(slot);
  }
  void wait_all() { wait_range(0, num_slots_); }

 private:
  static constexpr size_t kNumInline = 64;  // enough for eight ranks without an allocation

  Request* claim(size_t slot) {
    assert(slot < num_slots_ && requests_[slot].done.load() && "a slot is used again before its message is done");
    return &requests_[slot];
  }
  Request* claim_in_batch(size_t slot) {
    group_.begin_batch();
    return claim(slot);
  }
  bool all_done() const {
    for (size_t i = 0; i < num_slots_; ++i) {
      if (!requests_[i].done.load(std::memory_order_acquire)) return false;
    }
    return true;
  }

  const GroupView& group_;
  const size_t num_slots_;
  Request inline_[kNumInline];
  std::unique_ptr<Request[]> large_;
  Request* requests_;
};

}  // namespace bagua::collectives

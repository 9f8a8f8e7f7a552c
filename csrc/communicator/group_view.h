// GroupView: the ranks among whom a collective runs: all of a communicator, or some of them. Collectives see ranks
// 0..size-1 of their group; requests, deadlines and errors stay the communicator's and name its ranks.
//
// A value, for the thread that runs the communicator's operation.
#pragma once

#include <algorithm>
#include <cassert>
#include <optional>
#include <vector>

#include "csrc/communicator/communicator.h"

namespace bagua {

class GroupView {
 public:
  explicit GroupView(Communicator& communicator)
      : communicator_(communicator), rank_(communicator.rank()), size_(communicator.size()) {}
  // Some of another group: `members` are ranks of it, this one among them, in the same order on all of them.
  GroupView(const GroupView& whole, const std::vector<int>& members)
      : communicator_(whole.communicator_),
        rank_(static_cast<int>(std::find(members.begin(), members.end(), whole.rank_) - members.begin())),
        size_(static_cast<int>(members.size())) {
    assert(rank_ < size_ && "a group is made by its members");
    for (const int member : members) members_.push_back(whole.communicator_rank(member));
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The communicator's verbs; see communicator.h.
  void begin_batch() const { communicator_.begin_batch(); }
  void end_batch() const { communicator_.end_batch(); }
  void post_send(int peer, const void* data, size_t bytes, Request* request) const {
    communicator_.post_send(communicator_rank(peer), data, bytes, request);
  }
  void post_recv(int peer, void* data, size_t bytes, Request* request) const {
    communicator_.post_recv(communicator_rank(peer), data, bytes, request);
  }
  void wait(Request& request) const { communicator_.wait(request); }
  void send(int peer, const void* data, size_t bytes) const {
    communicator_.send(communicator_rank(peer), data, bytes);
  }
  void recv(int peer, void* data, size_t bytes) const { communicator_.recv(communicator_rank(peer), data, bytes); }
  void send_recv(int to, const void* data, size_t bytes, int from, void* into, size_t into_bytes) const {
    communicator_.send_recv(communicator_rank(to), data, bytes, communicator_rank(from), into, into_bytes);
  }
  void cancel() const { communicator_.cancel(); }

  // A collective of all of the communicator's ranks: whether a device transport does that by itself, and that.
  bool has_native(OperationKind kind, DType dtype, ReduceOp op = ReduceOp::kSum) const {
    return members_.empty() && communicator_.has_native(kind, dtype, op);
  }
  // Whether device memory moves through the host in the running operation.
  bool is_staged() const { return communicator_.is_staged(); }
  // These are of an operation on a device: see communicator.h.
  void use_stream(Stream stream) const { communicator_.use_stream(stream); }
  template <typename IsDone>
  void wait_for_device(const IsDone& is_done) const {
    communicator_.wait_for_device(is_done);
  }
  void enqueue_native(const NativeCollective& collective) const { communicator_.enqueue_native(collective); }

  // True when every other member can address this rank's shared memory and the reverse.
  bool all_share_memory() const {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && !communicator_.shares_memory(communicator_rank(peer))) return false;
    }
    return true;
  }
  std::optional<Address> address_of(const void* data, size_t bytes) const {
    return communicator_.address_of(data, bytes);
  }
  void* resolve(int peer, const Address& address, size_t bytes) const {
    return communicator_.resolve(communicator_rank(peer), address, bytes);
  }
  void* staging(size_t bytes) const { return communicator_.staging(bytes); }
  void count_moved(uint64_t sent, uint64_t received) const { communicator_.count_moved(sent, received); }

 private:
  int communicator_rank(int peer) const { return members_.empty() ? peer : members_[static_cast<size_t>(peer)]; }

  Communicator& communicator_;
  std::vector<int> members_;  // ranks of the communicator; empty: all
  const int rank_;
  const int size_;
};

}  // namespace bagua

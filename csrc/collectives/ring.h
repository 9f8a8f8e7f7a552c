// The pipeline that the ring collectives share: every rank receives from its left neighbour and sends to its
// right one, `num_items` messages each, in an order that all ranks share.
//
// An item is one chunk at one step. `lookahead` items are posted ahead, so that while one is being reduced
// the next ones travel. What is sent as item k has been received as item k - chunks_per_step, so the
// lookahead must be smaller than that. No deadlock: a rank waits only for items that a neighbour
// which has come as far as it has posted.
#pragma once

#include "csrc/collectives/posted_requests.h"

namespace bagua::collectives {

struct ConstBytes {
  const void* data;
  size_t bytes;
};
struct MutableBytes {
  void* data;
  size_t bytes;
};

// `stages` has: MutableBytes receive_into(item); ConstBytes send_from(item), asked for when the item is
// posted; received(item), called in order once the item has arrived and the outgoing item of the same number
// has left.
template <typename Stages>
void run_ring(const GroupView& group, size_t num_items, size_t lookahead, Stages& stages) {
  const int right = (group.rank() + 1) % group.size();
  const int left = (group.rank() + group.size() - 1) % group.size();
  const size_t window = lookahead + 1;
  PostedRequests requests(group, 2 * window);
  for (size_t k = 0; k < num_items + lookahead; ++k) {
    if (k < num_items) {
      const size_t slot = 2 * (k % window);
      const MutableBytes incoming = stages.receive_into(k);
      requests.recv(slot, left, incoming.data, incoming.bytes);
      const ConstBytes outgoing = stages.send_from(k);
      requests.send(slot + 1, right, outgoing.data, outgoing.bytes);
    }
    if (k >= lookahead) {
      const size_t slot = 2 * ((k - lookahead) % window);
      requests.wait_range(slot, slot + 2);
      stages.received(k - lookahead);
    }
  }
}

// Rank arithmetic around the ring; |distance| < size.
inline size_t ring_block(const GroupView& group, size_t distance_left) {
  const auto size = static_cast<size_t>(group.size());
  return (static_cast<size_t>(group.rank()) + size - distance_left % size) % size;
}

}  // namespace bagua::collectives

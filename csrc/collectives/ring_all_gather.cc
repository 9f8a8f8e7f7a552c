// Ring all_gather: large blocks between hosts, or many ranks.
//
// Every block travels once around the ring, straight to its offset in `output`, and is passed on from
// there: n-1 steps, (n-1) * b bytes sent per rank, two connections per rank, no workspace.

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/ring.h"
#include "csrc/collectives/selector.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {
namespace {

struct AllGatherStages {
  const GroupView& group;
  void* output;
  size_t block_bytes;
  Chunks chunks;

  MutableBytes block_chunk(size_t distance_left, size_t k) const {
    const Range chunk = chunk_of({0, block_bytes}, chunks.numel, k % chunks.count);
    return {at(output, ring_block(group, distance_left) * block_bytes + chunk.begin, 1), chunk.numel};
  }
  MutableBytes receive_into(size_t k) const { return block_chunk(k / chunks.count + 1, k); }
  ConstBytes send_from(size_t k) const {
    const MutableBytes from = block_chunk(k / chunks.count, k);
    return {from.data, from.bytes};
  }
  void received(size_t) const {}
};

}  // namespace

void ring_all_gather(Context& context, const void* input, void* output, size_t bytes) {
  if (bytes == 0) return;
  uint8_t* mine = at(output, static_cast<size_t>(context.group.rank()) * bytes, 1);
  if (mine != input) device::copy(mine, input, bytes, context.stream);
  const Chunks chunks = ring_chunks(bytes, 1, 1);
  AllGatherStages stages{context.group, output, bytes, chunks};
  run_ring(context.group, static_cast<size_t>(context.group.size() - 1) * chunks.count,
           std::min(kRingLookahead, chunks.count - 1), stages);
}

}  // namespace bagua::collectives

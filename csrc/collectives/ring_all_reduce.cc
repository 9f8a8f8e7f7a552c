// Ring all_reduce: large messages between hosts, types that need no wider accumulator.
//
// The tensor is n blocks. In n-1 steps every block travels once around the ring and gathers all
// contributions, in n-1 more steps the results travel around. 2(n-1) steps, 2(n-1)/n * B bytes sent per rank,
// two connections per rank. Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009. Here every block is cut into chunks, which follow one another (ring.h).
//
// Bit-equal on all ranks because each element is reduced along one path and the result is copied. Workspace:
// lookahead + 1 chunks.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/ring.h"
#include "csrc/collectives/selector.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {
namespace {

struct AllReduceStages {
  Context& context;
  void* data;
  size_t numel;
  DType dtype;
  ReduceOp op;
  Chunks chunks;
  size_t window;
  uint8_t* received_chunks;

  size_t item() const { return item_bytes(dtype); }
  size_t num_blocks() const { return static_cast<size_t>(context.group.size()); }
  size_t step(size_t k) const { return k / chunks.count; }
  bool reduces(size_t k) const { return step(k) < num_blocks() - 1; }
  uint8_t* slot(size_t k) const { return at(received_chunks, k % window * chunks.numel, item()); }

  Range chunk(size_t distance_left, size_t k) const {
    const Range block = partition(numel, num_blocks(), ring_block(context.group, distance_left));
    return chunk_of(block, chunks.numel, k % chunks.count);
  }

  MutableBytes receive_into(size_t k) const {
    const Range range = chunk(step(k) + 1, k);
    // A result replaces values that left this rank a whole round of the ring ago, which run_ring has waited for.
    return {reduces(k) ? slot(k) : at(data, range.begin, item()), range.numel * item()};
  }
  ConstBytes send_from(size_t k) const {
    const Range range = chunk(step(k), k);
    return {at(data, range.begin, item()), range.numel * item()};
  }
  void received(size_t k) const {
    if (!reduces(k)) return;
    const Range range = chunk(step(k) + 1, k);
    void* values = at(data, range.begin, item());
    kernels::reduce_into(op, dtype, values, slot(k), range.numel, context.stream);
    const bool is_complete = step(k) + 2 == num_blocks();
    if (is_complete && op == ReduceOp::kAvg) {
      kernels::scale(dtype, values, 1.0 / context.group.size(), range.numel, context.stream);
    }
  }
};

}  // namespace

void ring_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const auto size = static_cast<size_t>(context.group.size());
  const Chunks chunks = ring_chunks(partition(numel, size, 0).numel, item_bytes(dtype), context.chunk_scale());
  const size_t lookahead = std::min(kRingLookahead, chunks.count - 1);
  uint8_t* slots = context.workspace.get(kReceived, (lookahead + 1) * chunks.numel * item_bytes(dtype));
  AllReduceStages stages{context, data, numel, dtype, op, chunks, lookahead + 1, slots};
  run_ring(context.group, 2 * (size - 1) * chunks.count, lookahead, stages);
}

}  // namespace bagua::collectives

// Ring reduce_scatter: large blocks between hosts, types that need no wider accumulator.
//
// The first half of the ring all_reduce, shifted by one so that rank r ends with block r: n-1 steps,
// (n-1) * b bytes sent per rank for blocks of b bytes. The partial sums live in `output`, which is as large
// as one block: what a step receives replaces what the step before has sent. Workspace: lookahead + 1 chunks.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/pieces.h"
#include "csrc/collectives/ring.h"
#include "csrc/collectives/selector.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {
namespace {

struct ReduceScatterStages {
  Context& context;
  const void* input;
  void* output;
  size_t numel;  // of a block
  DType dtype;
  ReduceOp op;
  Chunks chunks;
  size_t window;
  uint8_t* received_chunks;

  size_t item() const { return item_bytes(dtype); }
  size_t step(size_t k) const { return k / chunks.count; }
  uint8_t* slot(size_t k) const { return at(received_chunks, k % window * chunks.numel, item()); }
  Piece chunk(size_t k) const { return chunk_of({0, numel}, chunks.numel, k % chunks.count); }
  const uint8_t* contribution(size_t distance_left, size_t k) const {
    return at(input, ring_block(context.team, distance_left) * numel + chunk(k).begin, item());
  }

  MutableBytes receive_into(size_t k) const { return {slot(k), chunk(k).numel * item()}; }
  ConstBytes send_from(size_t k) const {
    const void* from = step(k) == 0 ? contribution(1, k) : at(output, chunk(k).begin, item());
    return {from, chunk(k).numel * item()};
  }
  void received(size_t k) const {
    const void* sources[2] = {slot(k), contribution(step(k) + 2, k)};
    void* sum = at(output, chunk(k).begin, item());
    // SUM, not AVG, of the two: the division comes once, after the last contribution.
    const ReduceOp combine = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
    kernels::reduce_many(combine, dtype, sources, 2, &sum, 1, chunk(k).numel, context.stream);
    const bool is_complete = step(k) + 2 == static_cast<size_t>(context.team.size());
    if (is_complete && op == ReduceOp::kAvg) {
      kernels::scale(dtype, sum, 1.0 / context.team.size(), chunk(k).numel, context.stream);
    }
  }
};

}  // namespace

void ring_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const Chunks chunks = ring_chunks(numel, item_bytes(dtype));
  const size_t lookahead = std::min(kRingLookahead, chunks.count - 1);
  uint8_t* slots = context.workspace.get(kReceived, (lookahead + 1) * chunks.numel * item_bytes(dtype));
  ReduceScatterStages stages{context, input, output, numel, dtype, op, chunks, lookahead + 1, slots};
  run_ring(context.team, static_cast<size_t>(context.team.size() - 1) * chunks.count, lookahead, stages);
}

}  // namespace bagua::collectives

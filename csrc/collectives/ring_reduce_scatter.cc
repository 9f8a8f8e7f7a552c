// Ring reduce_scatter: large blocks between hosts, types that need no wider accumulator.
//
// The first half of the ring all_reduce, shifted by one so that rank r ends with block r: n-1 steps,
// (n-1) * b bytes sent per rank for blocks of b bytes. A few chunks at a time go all the way around, so a partial sum
// replaces what was received and leaves from there: `output` is written once, by the last step, which has
// read the own block's chunk by then. It may therefore be that block. Workspace: 2 * (lookahead + 1) chunks.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
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
  size_t window;  // of chunks that go around together
  uint8_t* sums;  // one window is being sent while the next one arrives

  size_t item() const { return item_bytes(dtype); }
  size_t num_steps() const { return static_cast<size_t>(context.group.size() - 1); }
  size_t step(size_t k) const { return k / window % num_steps(); }
  uint8_t* sum(size_t k) const { return at(sums, k % (2 * window) * chunks.numel, item()); }
  Range chunk(size_t k) const {
    return chunk_of({0, numel}, chunks.numel, k / (window * num_steps()) * window + k % window);
  }
  const uint8_t* contribution(size_t distance_left, size_t k) const {
    return at(input, ring_block(context.group, distance_left) * numel + chunk(k).begin, item());
  }

  MutableBytes receive_into(size_t k) const { return {sum(k), chunk(k).numel * item()}; }
  ConstBytes send_from(size_t k) const {
    return {step(k) == 0 ? contribution(1, k) : sum(k - window), chunk(k).numel * item()};
  }
  void received(size_t k) const {
    const void* sources[2] = {sum(k), contribution(step(k) + 2, k)};
    const bool is_complete = step(k) + 1 == num_steps();
    void* destination = is_complete ? at(output, chunk(k).begin, item()) : sum(k);
    // SUM, not AVG, of the two: the division comes once, after the last contribution.
    const ReduceOp combine = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
    kernels::reduce_many(combine, dtype, sources, 2, &destination, 1, chunk(k).numel, context.stream);
    if (is_complete && op == ReduceOp::kAvg) {
      kernels::scale(dtype, destination, 1.0 / context.group.size(), chunk(k).numel, context.stream);
    }
  }
};

}  // namespace

void ring_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const size_t item = item_bytes(dtype);
  const Chunks chunks = ring_window_chunks(numel, item, context.chunk_scale());
  const size_t window = std::min(kRingLookahead + 1, chunks.count);
  uint8_t* sums = context.workspace.get(kReceived, 2 * window * chunks.numel * item);
  ReduceScatterStages stages{context, input, output, numel, dtype, op, chunks, window, sums};
  run_ring(context.group, stages.num_steps() * round_up(chunks.count, window), window - 1, stages);
}

}  // namespace bagua::collectives

// Recursive doubling: the all_reduce of small messages.
//
// Let p be the largest power of two <= n. The first 2(n-p) ranks pair up: the even one hands its values to
// the odd one and waits. Then p ranks exchange whole vectors with partners at distance 1, 2, 4, ..., and the
// odd ranks hand the result back. Steps: log2 p, plus 2 if n is not a power of two. Bytes sent per rank:
// log2 p * B (+ B). Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
// Operations in MPICH", 2005.
//
// Bit-equal on all ranks: both partners combine the same two values in the same order, lower group first
// (f32 addition commutes, but the payload of a NaN and the sign of min(+0, -0) do not). f16 and bf16 travel
// as f32, which doubles a message whose cost is latency, and are rounded once at the end. AVG divides at the
// end, on every rank the same sum.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {
namespace {

struct Doubling {
  Context& context;
  void* values;    // the running result, of type `dtype`
  void* received;  // as large
  size_t numel;
  DType dtype;
  ReduceOp op;  // SUM in place of AVG

  size_t bytes() const { return numel * item_bytes(dtype); }

  void combine(bool mine_is_lower) {
    const void* sources[2] = {mine_is_lower ? values : received, mine_is_lower ? received : values};
    kernels::reduce_many(op, dtype, sources, 2, &values, 1, numel, context.stream);
  }

  void exchange(int partner) {
    PostedRequests requests(context.group, 2);
    requests.recv(0, partner, received, bytes());
    requests.send(1, partner, values, bytes());
    requests.wait_all();
    combine(context.group.rank() < partner);
  }

  void run() {
    const GroupView& group = context.group;
    const int rank = group.rank();
    int power = 1;
    while (2 * power <= group.size()) power *= 2;
    const int num_folded = group.size() - power;
    const bool is_folded = rank < 2 * num_folded;
    if (is_folded && rank % 2 == 0) {
      group.send(rank + 1, values, bytes());
      group.recv(rank + 1, values, bytes());
      return;
    }
    if (is_folded) {
      group.recv(rank - 1, received, bytes());
      combine(false);
    }
    const int position = is_folded ? rank / 2 : rank - num_folded;
    for (int distance = 1; distance < power; distance *= 2) {
      const int partner = position ^ distance;
      exchange(partner < num_folded ? 2 * partner + 1 : partner + num_folded);
    }
    if (is_folded) group.send(rank - 1, values, bytes());
  }
};

}  // namespace

void recursive_doubling_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  const DType wire = is_half ? DType::kF32 : dtype;
  const size_t bytes = numel * item_bytes(wire);
  void* values = data;
  if (is_half) {
    values = context.workspace.get(kAccumulator, bytes);
    kernels::cast(dtype, data, wire, values, numel, context.stream);
  }
  void* received = context.workspace.get(kReceived, bytes);
  const ReduceOp step = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  Doubling{context, values, received, numel, wire, step}.run();
  if (op == ReduceOp::kAvg) kernels::scale(wire, values, 1.0 / context.group.size(), numel, context.stream);
  if (is_half) kernels::cast(wire, values, dtype, data, numel, context.stream);
}

}  // namespace bagua::collectives

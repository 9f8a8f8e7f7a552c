// Hierarchical all_reduce: inside every node at full precision, then among the nodes' leaders (with the codec, if
// any), then inside every node again. What crosses the network is one tensor per node instead of one per rank.
//
// Nodes may have different numbers of ranks: sums are added and divided by the number of ranks at the end, never
// means by the number of nodes. f16 and bf16 averages, whose sums may overflow, add node means weighted by ranks.
// Where all ranks are on one node nothing is encoded.
// Steps: reduce + all_reduce + broadcast. Bytes sent between nodes per leader: those of the leaders' all_reduce.
// Source: section 3.3 of arXiv 2107.01499.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/on_host.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

Context among(Context& context, const std::vector<int>& members) {
  return {GroupView(context.group, members),
          context.workspace,
          context.host_workspace,
          context.events,
          context.stream,
          context.thresholds,
          context.rng_key};
}

size_t hierarchical_all_reduce(Context& context, const Hierarchy& hierarchy, void* data, size_t numel, DType dtype,
                               ReduceOp op, const Codec* codec, const Feedback& feedback,
                               const InputSegments& segments) {
  require_defined("all_reduce", op, dtype);
  if (codec != nullptr) require_compressible("all_reduce", *codec, dtype, op);
  segments.copy_to(data, numel, item_bytes(dtype), context.stream);
  if (hierarchy.leaders.size() == 1) return all_reduce(context, data, numel, dtype, op, nullptr);
  const size_t bytes = numel * item_bytes(dtype);
  if (numel > 0 && !feedback.is_asked_for && OnHost::is_for(context, bytes)) {
    OnHost host(context, data, bytes);
    const size_t num_blocks = hierarchical_all_reduce(host.context(), hierarchy, host.data(), numel, dtype, op, codec);
    host.copy_back(data, host.data(), bytes);
    return num_blocks;
  }
  const bool averages = op == ReduceOp::kAvg;
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  const ReduceOp inside = averages && !is_half ? ReduceOp::kSum : op;
  // Sums of f32 go into a codec divided: one of 16 bits has not their range.
  const bool divides_first = averages && !is_half && codec != nullptr;
  const double num_ranks = context.group.size();
  size_t num_nonfinite_blocks = 0;

  Context node = among(context, hierarchy.node);
  reduce(node, data, numel, dtype, inside, 0);
  if (node.group.rank() == 0) {
    if (divides_first) kernels::scale(dtype, data, 1.0 / num_ranks, numel, context.stream);
    if (averages && is_half) kernels::scale(dtype, data, node.group.size() / num_ranks, numel, context.stream);
    Context leaders = among(context, hierarchy.leaders);
    num_nonfinite_blocks = all_reduce(leaders, data, numel, dtype, averages ? ReduceOp::kSum : op, codec, feedback);
    if (averages && !is_half && !divides_first) kernels::scale(dtype, data, 1.0 / num_ranks, numel, context.stream);
  }
  broadcast(node, data, numel * item_bytes(dtype), 0);
  return num_nonfinite_blocks;
}

}  // namespace bagua::collectives

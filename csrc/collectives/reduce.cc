// reduce: checks and choice, and its two algorithms over messages. Ranks other than the root keep their data.
//
// Tree (small): a binomial tree towards the root; log2 n steps, at most one message of B bytes sent per rank.
// f16 and bf16 travel and add as f32 and are rounded once, at the root.
// Stripes (large): an all-to-all of stripes, then every owner sends its result to the root; 2 steps,
// (n-1)/n * B + B/n bytes sent per rank. Workspace: two chunks per rank.

#include "csrc/kernels/reduce.h"
#include "csrc/collectives/on_host.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/stripes.h"
#include "csrc/device/memory.h"
#include "csrc/kernels/cast.h"

namespace bagua::collectives {

void tree_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  if (numel == 0) return;
  const GroupView& group = context.group;
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  const DType wire = is_half ? DType::kF32 : dtype;
  const size_t bytes = numel * item_bytes(wire);
  uint8_t* values = context.workspace.get(kAccumulator, bytes);
  uint8_t* received = context.workspace.get(kReceived, bytes);
  if (is_half) {
    kernels::cast(dtype, data, wire, values, numel, context.stream);
  } else {
    device::copy(values, data, bytes, context.stream);
  }
  const int size = group.size();
  const int relative = (group.rank() - root + size) % size;
  for (int distance = 1; distance < size; distance *= 2) {
    if (relative & distance) {
      group.send((group.rank() - distance + size) % size, values, bytes);
      return;
    }
    if (relative + distance >= size) continue;
    group.recv((group.rank() + distance) % size, received, bytes);
    const ReduceOp combine = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
    kernels::reduce_into(combine, wire, values, received, numel, context.stream);
  }
  if (op == ReduceOp::kAvg) kernels::scale(wire, values, 1.0 / size, numel, context.stream);
  if (is_half) {
    kernels::cast(wire, values, dtype, data, numel, context.stream);
  } else {
    device::copy(data, values, bytes, context.stream);
  }
}

void stripes_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  StripesOptions options;
  options.input = data;
  options.numel = numel;
  options.dtype = dtype;
  options.op = op;
  options.results = context.group.rank() == root ? data : nullptr;
  options.receivers = StripesOptions::Receivers::kRoot;
  options.root = root;
  StripeReduction(context, options).run();
}

void reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  require_defined("reduce", op, dtype);
  const int size = context.group.size();
  if (size == 1 || numel == 0) return;
  const size_t bytes = numel * item_bytes(dtype);
  if (OnHost::is_for(context, bytes)) {
    OnHost host(context, data, bytes);
    reduce(host.context(), host.data(), numel, dtype, op, root);
    if (context.group.rank() == root) host.copy_back(data, host.data(), bytes);
    return;
  }
  Reach reach = reach_of(context, bytes, OperationKind::kReduce, dtype, op);
  if (select_reduce(context.thresholds, bytes, reach) == ReduceAlgorithm::kDirect) {
    if (direct_reduce(context, data, numel, dtype, op, root)) return;
    reach = Reach::kMessages;
  }
  switch (select_reduce(context.thresholds, bytes, reach)) {
    case ReduceAlgorithm::kTree: tree_reduce(context, data, numel, dtype, op, root); break;
    case ReduceAlgorithm::kNative: native_reduce(context, data, numel, dtype, op, root); break;
    default: stripes_reduce(context, data, numel, dtype, op, root); break;
  }
}

}  // namespace bagua::collectives

// reduce_scatter: checks and choice, and the one-shot algorithm by stripes: an all-to-all of the blocks, then
// one reduction in rank order (f16 and bf16 in f32, rounded once). 1 step, (n-1) * b bytes sent per rank for
// blocks of b bytes, a connection to every rank. Workspace: two chunks per rank.

#include "csrc/collectives/on_host.h"
#include "csrc/collectives/stripes.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

void stripes_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  StripesOptions options;
  options.input = input;
  options.numel = numel * static_cast<size_t>(context.group.size());
  options.dtype = dtype;
  options.op = op;
  options.own_result = output;
  options.receivers = StripesOptions::Receivers::kNobody;
  StripeReduction(context, options).run();
}

void reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  require_defined("reduce_scatter", op, dtype);
  if (numel == 0) return;
  const int size = context.group.size();
  const size_t bytes = numel * item_bytes(dtype);
  if (size == 1) {
    if (output != input) device::copy(output, input, bytes, context.stream);
    return;
  }
  const size_t input_bytes = static_cast<size_t>(size) * bytes;
  if (OnHost::is_for(context, input_bytes)) {
    OnHost host(context, input, input_bytes);
    uint8_t* const own = at(host.data(), static_cast<size_t>(context.group.rank()), bytes);
    reduce_scatter(host.context(), host.data(), own, numel, dtype, op);
    host.copy_back(output, own, bytes);
    return;
  }
  Reach reach = reach_of(context, bytes, OperationKind::kReduceScatter, dtype, op);
  if (select_reduce_scatter(context.thresholds, bytes, dtype, size, reach) == ReduceScatterAlgorithm::kDirect) {
    if (direct_reduce_scatter(context, input, output, numel, dtype, op)) return;
    reach = Reach::kMessages;
  }
  switch (select_reduce_scatter(context.thresholds, bytes, dtype, size, reach)) {
    case ReduceScatterAlgorithm::kRing: ring_reduce_scatter(context, input, output, numel, dtype, op); break;
    case ReduceScatterAlgorithm::kNative: native_reduce_scatter(context, input, output, numel, dtype, op); break;
    default: stripes_reduce_scatter(context, input, output, numel, dtype, op); break;
  }
}

}  // namespace bagua::collectives

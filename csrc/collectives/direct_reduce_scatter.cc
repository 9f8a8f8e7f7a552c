// Direct reduce_scatter: ranks of one host whose inputs lie in shared memory.
//
// Every rank reduces its block straight from all ranks' inputs into its output. Steps: one exchange of
// addresses, the reduction, a barrier. Bytes through memory per rank: n*b read, b written, for blocks of b.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/shared_buffers.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

bool direct_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return true;
  const GroupView& group = context.group;
  const auto size = static_cast<size_t>(group.size());
  const auto rank = static_cast<size_t>(group.rank());
  const size_t item = item_bytes(dtype);
  const SharedBuffers shared = exchange_buffers(context, input, size * numel * item, nullptr, 0);
  if (shared.sharing == Sharing::kNone) return false;
  for (size_t r = 0; r < size; ++r) shared.sources[r] = at(shared.at[r], rank * numel, item);
  {
    const EventSpan span(context.events, EventKind::kReduce, numel * item);
    kernels::reduce_many(op, dtype, shared.sources, group.size(), &output, 1, numel, context.stream);
  }
  group.count_moved((size - 1) * numel * item, (size - 1) * numel * item);
  barrier(context);
  return true;
}

}  // namespace bagua::collectives

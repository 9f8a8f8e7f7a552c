// Direct reduce: ranks of one host whose buffers lie in shared memory.
//
// The same as direct_all_reduce.cc, but every rank writes the stripe that it has reduced to the root only. Steps: one
// exchange of addresses, the reduction, a barrier. Bytes through memory per rank: B read, B/n written.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/shared_buffers.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

bool direct_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  if (numel == 0) return true;
  const GroupView& group = context.group;
  const auto size = static_cast<size_t>(group.size());
  const size_t item = item_bytes(dtype);
  const SharedBuffers shared = exchange_buffers(context, data, numel * item, nullptr, 0);
  if (shared.sharing == Sharing::kNone) return false;
  const Range mine = partition(numel, size, static_cast<size_t>(group.rank()), 64 / item);
  for (size_t r = 0; r < size; ++r) shared.sources[r] = at(shared.at[r], mine.begin, item);
  void* destination = at(shared.at[root], mine.begin, item);
  {
    const EventSpan span(context.events, EventKind::kReduce, mine.numel * item);
    kernels::reduce_many(op, dtype, shared.sources, group.size(), &destination, 1, mine.numel, context.stream);
  }
  // The peers have read their stripes of this rank's buffer; its own stripe's result went to the root.
  const bool is_root = group.rank() == root;
  const size_t others = numel - mine.numel;
  group.count_moved((others + (is_root ? 0 : mine.numel)) * item,
                    (mine.numel * (size - 1) + (is_root ? others : 0)) * item);
  barrier(context);
  return true;
}

}  // namespace bagua::collectives

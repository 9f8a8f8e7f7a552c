// Direct all_reduce: ranks of one host whose buffers lie in shared memory.
//
// Every rank reduces its own stripe of the tensor straight from all ranks' buffers into all ranks' buffers,
// in rank order and cache-sized blocks (kernels::reduce_many): nothing is copied, each element is read
// once per rank and written once per rank. Steps: one exchange of addresses, the reduction, a barrier. Bytes
// through memory per rank: B read, B written; f16 and bf16 add in f32 and round once.
// Bit-equal because the owner of a stripe writes the same value to every rank.
//
// If a rank fails after the exchange, a peer may go on writing into its buffer until it notices: the buffer's
// contents are lost then, as with every failed collective; its pages stay mapped as long as the peer needs.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

void direct_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const GroupView& group = context.group;
  const size_t item = item_bytes(dtype);
  const size_t staged_bytes = staging_bytes(group);
  const SharedBuffers shared = exchange_buffers(context, data, numel * item, group.staging(staged_bytes), staged_bytes);
  if (shared.sharing == Sharing::kStaging) {
    staged_all_reduce_in(context, shared, data, numel, dtype, op);
    return;
  }
  const auto size = static_cast<size_t>(group.size());
  // Whole cache lines, so that no two ranks write to the same one (where buffers are aligned, as tensors are).
  const Range mine = partition(numel, size, static_cast<size_t>(group.rank()), 64 / item);
  for (size_t r = 0; r < size; ++r) {
    shared.destinations[r] = at(shared.at[r], mine.begin, item);
    shared.sources[r] = shared.destinations[r];
  }
  {
    const EventSpan span(context.events, EventKind::kReduce, mine.numel * item);
    kernels::reduce_many(op, dtype, shared.sources, group.size(), shared.destinations, group.size(), mine.numel,
                         context.stream);
  }
  // The peers have read and written the rest of this rank's buffer, this rank its stripe of theirs.
  const uint64_t moved = (numel - mine.numel + mine.numel * (size - 1)) * item;
  group.count_moved(moved, moved);
  barrier(context);
}

}  // namespace bagua::collectives

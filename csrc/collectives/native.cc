// Collectives that a device transport does by itself, all ranks together and at full precision (NCCL's). Steps, bytes
// and the order of a sum are its own; it enqueues them on the operation's stream, and no rank waits.
#include "csrc/collectives/algorithms.h"

namespace bagua::collectives {

Reach reach_of(const Context& context, size_t bytes, OperationKind kind, DType dtype, ReduceOp op) {
  if (context.group.has_native(kind, dtype, op)) return Reach::kNative;
  const bool shares = asks_for_shared_memory(context.thresholds, bytes) && context.group.all_share_memory();
  return shares ? Reach::kSharedMemory : Reach::kMessages;
}

void native_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  context.group.enqueue_native({OperationKind::kAllReduce, data, data, numel, dtype, op});
}

void native_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  context.group.enqueue_native({OperationKind::kReduceScatter, input, output, numel, dtype, op});
}

void native_all_gather(Context& context, const void* input, void* output, size_t bytes) {
  context.group.enqueue_native({OperationKind::kAllGather, input, output, bytes, DType::kU8});
}

void native_broadcast(Context& context, void* data, size_t bytes, int root) {
  context.group.enqueue_native({OperationKind::kBroadcast, data, data, bytes, DType::kU8, ReduceOp::kSum, root});
}

void native_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  context.group.enqueue_native({OperationKind::kReduce, data, data, numel, dtype, op, root});
}

}  // namespace bagua::collectives

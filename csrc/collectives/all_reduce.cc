// all_reduce: checks, then the algorithm that selector.h names.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/on_host.h"
#include "csrc/collectives/selector.h"

namespace bagua::collectives {

void require_defined(std::string_view collective, ReduceOp op, DType dtype) {
  if (is_defined(op, dtype)) return;
  const std::string name(collective);
  std::string message =
      name + ": " + std::string(reduce_op_name(op)) + " is not defined for " + std::string(dtype_name(dtype));
  message += op == ReduceOp::kAvg ? "; use SUM and divide, or a floating type"
                                  : "; bitwise operators need integers or bool, SUM and PRODUCT any type but bool";
  throw Error(ErrorKind::kInvalidArgument, message, -1, name);
}

void require_compressible(std::string_view collective, const Codec& codec, DType dtype, ReduceOp op) {
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (is_sum && is_floating(dtype) && dtype != DType::kF64) return;
  const std::string name(collective);
  throw Error(ErrorKind::kInvalidArgument,
              name + " with codec '" + std::string(codec.name()) + "' got " + std::string(reduce_op_name(op)) + " of " +
                  std::string(dtype_name(dtype)) +
                  "; codecs do SUM and AVG of float32, float16 and bfloat16: use one of these, or no codec",
              -1, name);
}

size_t all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, const Codec* codec,
                  const Feedback& feedback, const InputSegments& segments) {
  require_defined("all_reduce", op, dtype);
  if (codec != nullptr) require_compressible("all_reduce", *codec, dtype, op);
  const int size = context.group.size();
  const size_t bytes = numel * item_bytes(dtype);
  if (size > 1 && numel > 0 && !feedback.is_asked_for && OnHost::is_for(context, bytes)) {
    segments.copy_to(data, numel, item_bytes(dtype), context.stream);
    OnHost host(context, data, bytes);
    const size_t num_nonfinite_blocks = all_reduce(host.context(), host.data(), numel, dtype, op, codec);
    host.copy_back(data, host.data(), bytes);
    return num_nonfinite_blocks;
  }
  if (size > 1 && numel > 0 && codec != nullptr) {
    return compressed_all_reduce(context, data, numel, dtype, op, *codec, feedback, segments);
  }
  segments.copy_to(data, numel, item_bytes(dtype), context.stream);
  if (size == 1 || numel == 0) return 0;
  const Reach reach = reach_of(context, bytes, OperationKind::kAllReduce, dtype, op);
  switch (select_all_reduce(context.thresholds, bytes, dtype, reach)) {
    case AllReduceAlgorithm::kRecursiveDoubling: recursive_doubling_all_reduce(context, data, numel, dtype, op); break;
    case AllReduceAlgorithm::kRing: ring_all_reduce(context, data, numel, dtype, op); break;
    case AllReduceAlgorithm::kTwoShot: two_shot_all_reduce(context, data, numel, dtype, op); break;
    case AllReduceAlgorithm::kDirect: direct_all_reduce(context, data, numel, dtype, op); break;
    case AllReduceAlgorithm::kNative: native_all_reduce(context, data, numel, dtype, op); break;
  }
  return 0;
}

}  // namespace bagua::collectives

// The three stages of a hierarchical all_reduce; see hierarchical_all_reduce.h.
#include "csrc/engine/hierarchical_all_reduce.h"

#include "csrc/kernels/reduce.h"

namespace bagua {
namespace {

class Stages {
 public:
  Stages(Context& context, const Hierarchy& hierarchy, size_t numel, DType dtype, Engine::Timeout timeout)
      : context_(context), hierarchy_(hierarchy), numel_(numel), dtype_(dtype), deadline_(Deadline::after(timeout)) {}

  uint64_t run(Engine& engine, OperationKind kind, ReduceOp op, const Engine::Run& stage) {
    Operation operation;
    operation.kind = kind;
    operation.reduce_op = op;
    operation.dtype = dtype_;
    operation.numel = numel_;
    const EventSpan span(context_.events, &engine == hierarchy_.leaders ? EventKind::kWire : EventKind::kReduce,
                         numel_ * item_bytes(dtype_));
    const auto work = engine.run_inline(operation, numel_ * item_bytes(dtype_), deadline_.remaining(), stage,
                                        [this] { context_.mesh.check(); });
    while (!work->wait_for(std::chrono::milliseconds(100))) context_.mesh.check();
    if (const auto error = work->error()) throw Error(*error);
    return work->nonfinite_blocks();
  }

 private:
  Context& context_;
  const Hierarchy& hierarchy_;
  const size_t numel_;
  const DType dtype_;
  const Deadline deadline_;
};

uint64_t run_stages(Context& context, const Hierarchy& hierarchy, void* data, size_t numel, DType dtype, ReduceOp op,
                    const Codec* codec, Engine::Timeout timeout) {
  Engine& node = *hierarchy.node;
  Stages stages(context, hierarchy, numel, dtype, timeout);
  const bool averages = op == ReduceOp::kAvg;
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  const ReduceOp inside = averages && !is_half ? ReduceOp::kSum : op;
  // Sums of f32 go into a codec divided: one of 16 bits has not their range.
  const bool divides_first = averages && !is_half && codec != nullptr;
  stages.run(node, OperationKind::kReduce, inside, [&](Context& inner) -> uint64_t {
    collectives::reduce(inner, data, numel, dtype, inside, 0);
    return 0;
  });
  uint64_t nonfinite_blocks = 0;
  if (node.mesh().rank() == 0) {
    const double num_ranks = context.mesh.size();
    if (divides_first) kernels::scale(dtype, data, 1.0 / num_ranks, numel, context.stream);
    if (hierarchy.leaders != nullptr) {
      if (averages && is_half) kernels::scale(dtype, data, node.mesh().size() / num_ranks, numel, context.stream);
      const ReduceOp between = averages ? ReduceOp::kSum : op;
      nonfinite_blocks = stages.run(*hierarchy.leaders, OperationKind::kAllReduce, between, [&](Context& inner) {
        return collectives::all_reduce(inner, data, numel, dtype, between, codec);
      });
    }
    if (averages && !is_half && !divides_first) kernels::scale(dtype, data, 1.0 / num_ranks, numel, context.stream);
  }
  stages.run(node, OperationKind::kBroadcast, ReduceOp::kSum, [&](Context& inner) -> uint64_t {
    collectives::broadcast(inner, data, numel * item_bytes(dtype), 0);
    return 0;
  });
  return nonfinite_blocks;
}

}  // namespace

Engine::Run hierarchical_all_reduce(Hierarchy hierarchy, void* data, size_t numel, DType dtype, ReduceOp op,
                                    const Codec* codec, Engine::Timeout timeout) {
  return [=](Context& context) -> uint64_t {
    try {
      return run_stages(context, hierarchy, data, numel, dtype, op, codec, timeout);
    } catch (const Error& error) {
      // Ranks that wait in the other stage learn it from there.
      hierarchy.node->mesh().poison(error);
      if (hierarchy.leaders != nullptr) hierarchy.leaders->mesh().poison(error);
      throw;
    }
  };
}

}  // namespace bagua

// Compressed reduce_scatter: the first shot of the compressed all_reduce (compressed_all_reduce.cc).
//
// encode every block for its owner -> all-to-all -> the owner decodes and adds in f32 in rank order (AVG: times
// 1/n), and rounds once to the tensor's type. 1 step, (n-1) * c bytes sent per rank, c the codes of a block. The
// own block passes through the codec too, so the result does not depend on who owns it.

#include "csrc/collectives/exchange.h"
#include "csrc/device/memory.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

size_t compressed_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype,
                                 ReduceOp op, const Codec& codec, const Feedback& feedback) {
  require_compressible("reduce_scatter", codec, dtype, op);
  const int size = context.group.size();
  if (numel == 0) return 0;
  if (size == 1) {
    if (output != input) device::copy(output, input, numel * item_bytes(dtype), context.stream);
    return 0;
  }
  ExchangeOptions options{input, dtype, &codec, {}, {}};
  if (feedback.is_on()) options.residual = {feedback.worker_in, feedback.worker_out, feedback.dtype};
  const DType sent_dtype = feedback.is_on() ? DType::kF32 : dtype;
  for (int r = 0; r < size; ++r) {
    options.targets.push_back({r, {static_cast<size_t>(r) * numel, numel}});
    options.sources.push_back({r, {0, numel}});
  }
  PairwiseExchange exchange(context, std::move(options));
  const size_t sums_bytes = std::min(numel, exchange.chunk_numel()) * sizeof(float);
  auto* sums = reinterpret_cast<float*>(context.workspace.get(kAccumulator, sums_bytes));
  return exchange.run([&](size_t, const auto& arrivals) {
    const Range range = arrivals[0].range;
    const EventSpan span(context.events, EventKind::kDecode,
                         static_cast<size_t>(size) * codec.wire_bytes(range.numel, sent_dtype));
    device::fill_zero(sums, range.numel * sizeof(float), context.stream);
    for (const auto& arrival : arrivals) {
      codec.decode_add(arrival.bytes, sent_dtype, range.numel, sums, context.stream);
    }
    if (op == ReduceOp::kAvg) kernels::scale(DType::kF32, sums, 1.0 / size, range.numel, context.stream);
    kernels::cast(DType::kF32, sums, dtype, at(output, range.begin, item_bytes(dtype)), range.numel, context.stream);
  });
}

}  // namespace bagua::collectives

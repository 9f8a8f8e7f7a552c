// Compressed all_gather: the second shot of the compressed all_reduce.
//
// encode the own block once -> to every rank -> decode all blocks, the own one too, so that all ranks end
// bit-equal. 1 step, (n-1) * c bytes sent per rank, c the codes of a block.

#include "csrc/collectives/exchange.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

size_t compressed_all_gather(Context& context, const void* input, void* output, size_t numel, DType dtype,
                             const Codec& codec) {
  require_compressible("all_gather", codec, dtype);
  const int size = context.group.size();
  if (numel == 0) return 0;
  if (size == 1) {
    if (output != input) device::copy(output, input, numel * item_bytes(dtype), context.stream);
    return 0;
  }
  ExchangeOptions options{input, dtype, &codec, {}, {}, /*same_for_all=*/true};
  for (int r = 0; r < size; ++r) {
    options.targets.push_back({r, {0, numel}});
    options.sources.push_back({r, {static_cast<size_t>(r) * numel, numel}});
  }
  return PairwiseExchange(context, std::move(options)).run([&](size_t, const auto& arrivals) {
    for (const auto& arrival : arrivals) {
      const Range range = arrival.range;
      const EventSpan span(context.events, EventKind::kDecode, codec.wire_bytes(range.numel, dtype));
      void* values = at(output, range.begin, item_bytes(dtype));
      codec.decode(arrival.bytes, dtype, range.numel, values, context.stream);
    }
  });
}

}  // namespace bagua::collectives

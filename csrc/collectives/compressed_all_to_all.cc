// Compressed all_to_all: every block is encoded by its sender and decoded by its receiver, the own one too, so
// that a value does not depend on where its sender and receiver run. 1 step; the codes of n-1 blocks sent per rank.
// Rows that are whole blocks of the codec are encoded by themselves in any case, and many at once.

#include "csrc/collectives/exchange.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

size_t compressed_all_to_all(Context& context, const void* input, const std::vector<size_t>& input_splits, void* output,
                             const std::vector<size_t>& output_splits, DType dtype, const Codec& codec,
                             size_t row_numel) {
  require_compressible("all_to_all", codec, dtype);
  const int size = context.group.size();
  const size_t item = item_bytes(dtype);
  require_splits(context.group, input_splits, output_splits);
  if (size == 1) {
    if (input_splits[0] > 0 && output != input) device::copy(output, input, input_splits[0] * item, context.stream);
    return 0;
  }
  ExchangeOptions options{input, dtype, &codec, {}, {}};
  options.row_numel = row_numel % codec.block_numel() == 0 ? 0 : row_numel;
  size_t input_begin = 0, output_begin = 0;
  for (int r = 0; r < size; ++r) {
    const size_t outgoing = input_splits[static_cast<size_t>(r)], incoming = output_splits[static_cast<size_t>(r)];
    options.targets.push_back({r, {input_begin, outgoing}});
    options.sources.push_back({r, {output_begin, incoming}});
    input_begin += outgoing;
    output_begin += incoming;
  }
  PairwiseExchange exchange(context, std::move(options));
  return exchange.run([&](size_t, const auto& arrivals) {
    for (const auto& arrival : arrivals) {
      if (arrival.range.numel > 0) exchange.decode(arrival, at(output, arrival.range.begin, item));
    }
  });
}

}  // namespace bagua::collectives

// Posting, coding and waiting of a pairwise exchange; see exchange.h.
#include "csrc/collectives/exchange.h"

#include <algorithm>

#include "csrc/collectives/selector.h"

namespace bagua::collectives {

PairwiseExchange::PairwiseExchange(Context& context, ExchangeOptions options)
    : context_(context),
      options_(std::move(options)),
      num_sent_(options_.codec == nullptr || options_.targets.empty() ? 0
                : options_.same_for_all                               ? 1
                                                                      : options_.targets.size()),
      chunk_numel_(exchange_chunk_numel(granule(), context.group.size(), context.chunk_scale())),
      requests_(context.group, kInFlight * (options_.targets.size() + options_.sources.size())) {
  const auto num_awaited =
      std::count_if(options_.sources.begin(), options_.sources.end(),
                    [this](const PeerRange& source) { return !is_own(source) && source.range.numel > 0; });
  if (num_awaited < context.group.size() - 1) context.events.set_waits_for_some();
  size_t longest = 0;
  for (const PeerRange& target : options_.targets) longest = std::max(longest, target.range.numel);
  for (const PeerRange& source : options_.sources) longest = std::max(longest, source.range.numel);
  num_rounds_ = divide_up(longest, chunk_numel_);
  slot_bytes_ = wire_bytes(std::min(longest, chunk_numel_));
  const size_t in_flight = std::min(kInFlight, num_rounds_);
  sent_ = context.workspace.get(kSentCodes, in_flight * num_sent_ * slot_bytes_);
  received_ = context.workspace.get(kReceivedCodes, in_flight * options_.sources.size() * slot_bytes_);
}

// Chunks are cut at multiples of it.
size_t PairwiseExchange::granule() const {
  if (options_.codec == nullptr) return 1;
  return options_.row_numel == 0 ? options_.codec->block_numel() : options_.row_numel;
}

size_t PairwiseExchange::wire_bytes(size_t numel) const {
  if (numel == 0) return 0;
  const Codec* codec = options_.codec;
  if (codec != nullptr && options_.row_numel > 0) {
    return numel / options_.row_numel * codec->wire_bytes(options_.row_numel, sent_dtype());
  }
  return codec != nullptr ? codec->wire_bytes(numel, sent_dtype()) : numel * item_bytes(options_.dtype);
}

uint8_t* PairwiseExchange::sent(size_t k, size_t target) const {
  const size_t index = options_.same_for_all ? 0 : target;
  return sent_ + (k % kInFlight * num_sent_ + index) * slot_bytes_;
}

uint8_t* PairwiseExchange::received(size_t k, size_t source) const {
  return received_ + (k % kInFlight * options_.sources.size() + source) * slot_bytes_;
}

// Receives come first.
size_t PairwiseExchange::request(size_t k, size_t index) const {
  return k % kInFlight * (options_.sources.size() + options_.targets.size()) + index;
}

void PairwiseExchange::post(size_t k) {
  const size_t num_sources = options_.sources.size();
  for (size_t s = 0; s < num_sources; ++s) {
    const PeerRange& source = options_.sources[s];
    if (is_own(source)) continue;
    requests_.recv(request(k, s), source.rank, received(k, s), wire_bytes(chunk(source, k).numel));
  }
  if (options_.same_for_all && num_sent_ > 0) {
    encode(options_.targets[0].range, chunk(options_.targets[0], k), sent(k, 0));
  }
  for (size_t t = 0; t < options_.targets.size(); ++t) {
    const PeerRange& target = options_.targets[t];
    const void* bytes = outgoing(k, t);
    if (is_own(target)) continue;
    requests_.send(request(k, num_sources + t), target.rank, bytes, wire_bytes(chunk(target, k).numel));
  }
}

// Returns what the target is sent; encodes it unless that has been done.
const void* PairwiseExchange::outgoing(size_t k, size_t target) {
  const Range range = chunk(options_.targets[target], k);
  if (options_.codec == nullptr) return at(options_.input, range.begin, item_bytes(options_.dtype));
  if (!options_.same_for_all) encode(options_.targets[target].range, range, sent(k, target));
  return sent(k, target);
}

void PairwiseExchange::encode(Range range, Range chunk, uint8_t* bytes) {
  if (chunk.numel == 0) return;
  const size_t item = item_bytes(options_.dtype);
  const EventSpan span(context_.events, EventKind::kEncode, chunk.numel * item);
  const void* values = options_.prepare ? options_.prepare(chunk) : at(options_.input, chunk.begin, item);
  const CounterRng rng{derive_key(context_.rng_key, range.begin), chunk.begin - range.begin};
  if (const size_t row_numel = options_.row_numel; row_numel > 0) {
    for (size_t begin = 0; begin < chunk.numel; begin += row_numel) {
      const CounterRng of_row{derive_key(rng.key, (rng.first + begin) / row_numel), 0};
      num_nonfinite_blocks_ += options_.codec->encode(at(values, begin, item), options_.dtype, row_numel,
                                                      bytes + wire_bytes(begin), of_row, context_.stream);
    }
    return;
  }
  if (!options_.residual.is_on()) {
    num_nonfinite_blocks_ += options_.codec->encode(values, options_.dtype, chunk.numel, bytes, rng, context_.stream);
    return;
  }
  const size_t tile_numel = context_.stream.is_cpu() ? max_tile_numel(chunk_numel_, granule(), context_.stream) : 0;
  auto* totals = reinterpret_cast<float*>(context_.workspace.get(kTotals, 2 * tile_numel * sizeof(float)));
  for_each_tile(chunk.numel, granule(), context_.stream, [&](size_t begin, size_t numel) {
    num_nonfinite_blocks_ += encode_with_residual(
        *options_.codec, at(values, begin, item), options_.dtype, residual_from(options_.residual, chunk.begin + begin),
        numel, bytes + wire_bytes(begin), {rng.key, rng.first + begin}, totals, totals + tile_numel, context_.stream);
  });
}

void PairwiseExchange::decode(const Arrival& arrival, void* destination) const {
  const size_t numel = arrival.range.numel, item = item_bytes(options_.dtype);
  const size_t message_numel = options_.row_numel == 0 ? numel : options_.row_numel;
  const EventSpan span(context_.events, EventKind::kDecode, wire_bytes(numel));
  for (size_t begin = 0; begin < numel; begin += message_numel) {
    options_.codec->decode(arrival.bytes + wire_bytes(begin), options_.dtype, message_numel,
                           at(destination, begin, item), context_.stream);
  }
}

void PairwiseExchange::wait(size_t k) {
  size_t bytes = 0;
  for (const PeerRange& source : options_.sources) bytes += is_own(source) ? 0 : wire_bytes(chunk(source, k).numel);
  const EventSpan span(context_.events, EventKind::kWire, bytes);
  requests_.wait_range(request(k, 0), request(k, options_.sources.size() + options_.targets.size()));
}

const std::vector<PairwiseExchange::Arrival>& PairwiseExchange::arrivals(size_t k) {
  arrivals_.clear();
  for (size_t s = 0; s < options_.sources.size(); ++s) {
    const PeerRange& source = options_.sources[s];
    const uint8_t* bytes = received(k, s);
    if (is_own(source)) {
      size_t t = 0;
      while (!is_own(options_.targets[t])) ++t;
      bytes = sent(k, t);
    }
    arrivals_.push_back({source.rank, chunk(source, k), bytes});
  }
  return arrivals_;
}

}  // namespace bagua::collectives

// Compressed two-shot all_reduce: C_LP_S of the paper, x <- Q(sum_j Q(x_j)), arXiv 2107.01499.
//
// encode -> all-to-all of stripes -> decode and add in f32 in rank order (AVG: times 1/n in f32) -> encode the
// own stripe -> all-gather -> decode. 2 steps, 2(n-1)/n * C bytes sent per rank, C the size of the codes.
// Consistency: the own contribution passes through the codec too, and every rank, the owner of a stripe
// too, takes the decoded value, so all ranks end bit-equal.
//
// With feedback the contribution is x_j + delta_j and the result Q(... + epsilon), and both residuals are renewed.
// Stripes and chunks are cut at multiples of the codec's block, so the result does not depend on the
// chunking. Rounds of one chunk per stripe (two_shot_pipeline.h): while round k travels, round k+1 is encoded. The
// workspace is six chunks of codes per rank, and a tile (chunking.h) of sums, of residuals and of gathered segments,
// however large the tensor. On a device a chunk is one tile, and what a CPU does to it in several passes through its
// cache is one kernel (kernels/fused.h).

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/collectives/two_shot_pipeline.h"
#include "csrc/device/memory.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {
namespace {

class CompressedAllReduce {
 public:
  CompressedAllReduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, const Codec& codec,
                      const Feedback& feedback, const InputSegments& segments)
      : context_(context),
        codec_(codec),
        feedback_(feedback),
        segments_(segments),
        data_(data),
        numel_(numel),
        dtype_(dtype),
        sent_dtype_(feedback.is_on() ? DType::kF32 : dtype),
        op_(op),
        size_(static_cast<size_t>(context.group.size())),
        rank_(static_cast<size_t>(context.group.rank())),
        chunks_(codec_chunks(owned_stripe(numel, context.group.size(), 0, codec).numel, codec.block_numel(),
                             context.group.size(), context.chunk_scale())),
        contribution_bytes_(codec.wire_bytes(chunks_.numel, sent_dtype_)),
        result_bytes_(codec.wire_bytes(chunks_.numel, DType::kF32)),
        requests_(context.group, kRoundsInFlight * kNumTransfers * size_) {
    Workspace& workspace = context.workspace;
    const size_t rounds = std::min(kRoundsInFlight, chunks_.count);
    sent_ = workspace.get(kSentCodes, rounds * size_ * contribution_bytes_);
    received_ = workspace.get(kReceivedCodes, rounds * size_ * contribution_bytes_);
    results_ = workspace.get(kResultCodes, rounds * size_ * result_bytes_);
    const size_t tile_numel = max_tile_numel(chunks_.numel, codec.block_numel(), context.stream);
    sums_ = reinterpret_cast<float*>(workspace.get(kAccumulator, tile_numel * sizeof(float)));
    if (segments.is_given()) gathered_ = workspace.get(kGathered, tile_numel * item_bytes(dtype));
    if (feedback.is_on()) {
      totals_ = reinterpret_cast<float*>(workspace.get(kTotals, tile_numel * sizeof(float)));
    }
  }

  size_t run() {
    run_two_shot(chunks_.count, *this);
    return num_nonfinite_blocks_;
  }

  void post_contributions(size_t k);
  void reduce(size_t k);
  void post_results(size_t k);
  void take_results(size_t k);

 private:
  enum Transfer : size_t { kSendContribution = 0, kRecvContribution, kSendResult, kRecvResult, kNumTransfers };

  Range chunk(size_t rank, size_t k) const {
    return chunk_of(owned_stripe(numel_, context_.group.size(), static_cast<int>(rank), codec_), chunks_.numel, k);
  }
  size_t slot(size_t k, Transfer transfer, size_t peer) const {
    return (k % kRoundsInFlight * kNumTransfers + transfer) * size_ + peer;
  }
  uint8_t* codes(uint8_t* base, size_t k, size_t peer, size_t bytes) const {
    return base + (k % kRoundsInFlight * size_ + peer) * bytes;
  }
  uint8_t* sent(size_t k, size_t to) const { return codes(sent_, k, to, contribution_bytes_); }
  uint8_t* received(size_t k, size_t from) const { return codes(received_, k, from, contribution_bytes_); }
  uint8_t* result(size_t k, size_t owner) const { return codes(results_, k, owner, result_bytes_); }
  size_t wire_bytes(size_t numel, DType dtype) const { return numel == 0 ? 0 : codec_.wire_bytes(numel, dtype); }

  void encode_contribution(size_t k, size_t owner, uint8_t* bytes);
  void encode_with_feedback(DType dtype, const void* values, const kernels::Residual& residual, size_t numel,
                            uint8_t* bytes, CounterRng rng);
  // From element `begin` of the tensor, and of the stripe that this rank owns; off without feedback.
  kernels::Residual worker_residual(size_t begin) const {
    return residual_from({feedback_.worker_in, feedback_.worker_out, feedback_.dtype}, begin);
  }
  kernels::Residual owner_residual(size_t begin) const {
    if (!feedback_.is_on()) return {};
    return residual_from({feedback_.owner_in, feedback_.owner_out, feedback_.dtype}, begin);
  }
  void wait(size_t k, Transfer sends, Transfer receives, size_t bytes);

  Context& context_;
  const Codec& codec_;
  const Feedback feedback_;
  const InputSegments& segments_;
  void* const data_;
  const size_t numel_;
  const DType dtype_;
  const DType sent_dtype_;  // what contributions are encoded from: with their residuals f32
  const ReduceOp op_;
  const size_t size_;
  const size_t rank_;
  const Chunks chunks_;
  const size_t contribution_bytes_;  // of one chunk
  const size_t result_bytes_;        // of one chunk; results are encoded from f32
  uint8_t* sent_;
  uint8_t* received_;  // the own contribution too, at the own rank
  uint8_t* results_;   // the own result too
  float* sums_;
  float* totals_ = nullptr;
  uint8_t* gathered_ = nullptr;
  size_t num_nonfinite_blocks_ = 0;
  PostedRequests requests_;
};

void CompressedAllReduce::encode_contribution(size_t k, size_t owner, uint8_t* bytes) {
  const Range range = chunk(owner, k);
  if (range.numel == 0) return;
  const EventSpan span(context_.events, EventKind::kEncode, range.numel * item_bytes(dtype_));
  const size_t item = item_bytes(dtype_);
  for_each_tile(range.numel, codec_.block_numel(), context_.stream, [&](size_t begin, size_t numel) {
    const Range tile{range.begin + begin, numel};
    const void* values =
        segments_.is_given() ? segments_.read(tile, item, gathered_, context_.stream) : at(data_, tile.begin, item);
    uint8_t* codes = bytes + wire_bytes(begin, sent_dtype_);
    const CounterRng rng{derive_key(context_.rng_key, 0), tile.begin};
    if (!feedback_.is_on()) {
      num_nonfinite_blocks_ += codec_.encode(values, dtype_, numel, codes, rng, context_.stream);
      return;
    }
    encode_with_feedback(dtype_, values, worker_residual(tile.begin), numel, codes, rng);
  });
}

// `values` may be sums_, whose content is lost.
void CompressedAllReduce::encode_with_feedback(DType dtype, const void* values, const kernels::Residual& residual,
                                               size_t numel, uint8_t* bytes, CounterRng rng) {
  num_nonfinite_blocks_ +=
      encode_with_residual(codec_, values, dtype, residual, numel, bytes, rng, totals_, sums_, context_.stream);
}

// `bytes` is what arrives, for the timeline.
void CompressedAllReduce::wait(size_t k, Transfer sends, Transfer receives, size_t bytes) {
  const EventSpan span(context_.events, EventKind::kWire, bytes);
  requests_.wait_range(slot(k, sends, 0), slot(k, receives, 0) + size_);
}

void CompressedAllReduce::post_contributions(size_t k) {
  const size_t my_bytes = wire_bytes(chunk(rank_, k).numel, sent_dtype_);
  for (size_t step = 1; step < size_; ++step) {
    const size_t from = (rank_ + size_ - step) % size_;
    requests_.recv(slot(k, kRecvContribution, from), static_cast<int>(from), received(k, from), my_bytes);
  }
  // Each stripe leaves as soon as it is encoded; the own one, which no rank waits for, comes last.
  for (size_t step = 1; step < size_; ++step) {
    const size_t to = (rank_ + step) % size_;
    encode_contribution(k, to, sent(k, to));
    requests_.send(slot(k, kSendContribution, to), static_cast<int>(to), sent(k, to),
                   wire_bytes(chunk(to, k).numel, sent_dtype_));
  }
  encode_contribution(k, rank_, received(k, rank_));
}

void CompressedAllReduce::reduce(size_t k) {
  const Range own = chunk(rank_, k);
  const size_t numel = own.numel;
  wait(k, kSendContribution, kRecvContribution, (size_ - 1) * wire_bytes(numel, sent_dtype_));
  if (numel == 0) return;
  const size_t owned = own.begin - chunk(rank_, 0).begin;
  const uint64_t rng_key = derive_key(context_.rng_key, 1);
  if (!context_.stream.is_cpu()) {
    const EventSpan span(context_.events, EventKind::kReduce, size_ * wire_bytes(numel, sent_dtype_));
    const double factor = op_ == ReduceOp::kAvg ? 1.0 / context_.group.size() : 1.0;
    num_nonfinite_blocks_ +=
        codec_.reduce_encode({received(k, 0), contribution_bytes_, context_.group.size()}, sent_dtype_, factor,
                             owner_residual(owned), numel, result(k, rank_), {rng_key, own.begin}, context_.stream);
    return;
  }
  const int64_t begin_ns = EventLog::now_ns();
  int64_t decoding_ns = 0;
  for_each_tile(numel, codec_.block_numel(), context_.stream, [&](size_t begin, size_t count) {
    const int64_t tile_ns = EventLog::now_ns();
    device::fill_zero(sums_, count * sizeof(float), context_.stream);
    for (size_t r = 0; r < size_; ++r) {
      const uint8_t* codes = received(k, r) + wire_bytes(begin, sent_dtype_);
      codec_.decode_add(codes, sent_dtype_, count, sums_, context_.stream);
    }
    if (op_ == ReduceOp::kAvg) kernels::scale(DType::kF32, sums_, 1.0 / context_.group.size(), count, context_.stream);
    decoding_ns += EventLog::now_ns() - tile_ns;
    uint8_t* codes = result(k, rank_) + wire_bytes(begin, DType::kF32);
    const CounterRng rng{rng_key, own.begin + begin};
    if (!feedback_.is_on()) {
      num_nonfinite_blocks_ += codec_.encode(sums_, DType::kF32, count, codes, rng, context_.stream);
      return;
    }
    encode_with_feedback(DType::kF32, sums_, owner_residual(owned + begin), count, codes, rng);
  });
  // The tiles decode and encode in turns: their sums are recorded, one after the other.
  context_.events.add(EventKind::kDecode, begin_ns, begin_ns + decoding_ns, size_ * wire_bytes(numel, sent_dtype_));
  context_.events.add(EventKind::kEncode, begin_ns + decoding_ns, EventLog::now_ns(), numel * sizeof(float));
}

void CompressedAllReduce::post_results(size_t k) {
  const size_t my_bytes = wire_bytes(chunk(rank_, k).numel, DType::kF32);
  for (size_t step = 1; step < size_; ++step) {
    const size_t from = (rank_ + size_ - step) % size_;
    requests_.recv(slot(k, kRecvResult, from), static_cast<int>(from), result(k, from),
                   wire_bytes(chunk(from, k).numel, DType::kF32));
    const size_t to = (rank_ + step) % size_;
    requests_.send(slot(k, kSendResult, to), static_cast<int>(to), result(k, rank_), my_bytes);
  }
}

void CompressedAllReduce::take_results(size_t k) {
  size_t bytes = 0;
  for (size_t owner = 0; owner < size_; ++owner) {
    if (owner != rank_) bytes += wire_bytes(chunk(owner, k).numel, DType::kF32);
  }
  wait(k, kSendResult, kRecvResult, bytes);
  for (size_t owner = 0; owner < size_; ++owner) {
    const Range range = chunk(owner, k);
    if (range.numel == 0) continue;
    const EventSpan span(context_.events, EventKind::kDecode, wire_bytes(range.numel, DType::kF32));
    void* values = at(data_, range.begin, item_bytes(dtype_));
    if (dtype_ == DType::kF32) {
      codec_.decode(result(k, owner), DType::kF32, range.numel, values, context_.stream);
      continue;
    }
    // The f32 sums of the last round have been encoded, so their memory is free.
    for_each_tile(range.numel, codec_.block_numel(), context_.stream, [&](size_t begin, size_t numel) {
      const uint8_t* codes = result(k, owner) + wire_bytes(begin, DType::kF32);
      codec_.decode(codes, DType::kF32, numel, sums_, context_.stream);
      kernels::cast(DType::kF32, sums_, dtype_, at(values, begin, item_bytes(dtype_)), numel, context_.stream);
    });
  }
}

}  // namespace

Range owned_stripe(size_t numel, int size, int rank, const Codec& codec) {
  return partition(numel, static_cast<size_t>(size), static_cast<size_t>(rank), codec.block_numel());
}

size_t compressed_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, const Codec& codec,
                             const Feedback& feedback, const InputSegments& segments) {
  return CompressedAllReduce(context, data, numel, dtype, op, codec, feedback, segments).run();
}

}  // namespace bagua::collectives

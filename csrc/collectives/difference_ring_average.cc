// One step of decentralised training with compressed differences on a ring; the formula is in collectives.h.
//
// 1 step; the codes of z to both neighbours, 2 C bytes sent per rank, C the size of the codes (C between two ranks), in
// chunks (exchange.h). What travels is how far the weights have moved from what the neighbours know, which is small,
// so that the error of its coarse codes is small too, and goes into the next difference.
// Source: arXiv 1803.06443 (DCD-PSGD).
#include "csrc/collectives/exchange.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/weighted_sum.h"

namespace bagua::collectives {
namespace {

class DifferenceRing {
 public:
  DifferenceRing(Context& context, void* data, size_t numel, DType dtype, const Replicas& replicas, const Codec& codec)
      : context_(context),
        data_(data),
        numel_(numel),
        dtype_(dtype),
        replicas_(replicas),
        codec_(codec),
        left_((context.group.rank() + context.group.size() - 1) % context.group.size()),
        right_((context.group.rank() + 1) % context.group.size()),
        exchange_(context, options()) {
    const size_t chunk_numel = std::min(numel, exchange_.chunk_numel());
    difference_ = reinterpret_cast<float*>(context.workspace.get(kTotals, chunk_numel * sizeof(float)));
  }

  size_t run() {
    return exchange_.run([this](size_t, const auto& arrivals) {
      for (const auto& arrival : arrivals) take(arrival);
    });
  }

 private:
  // The own part passes through the codec too, as that of every rank does that keeps a replica of it. It comes last: by
  // then the neighbours' are taken in, and the weights can be renewed.
  ExchangeOptions options() {
    ExchangeOptions options{data_, DType::kF32, &codec_, {}, {}, /*same_for_all=*/true};
    options.prepare = [this](Range chunk) { return difference(chunk); };
    options.sources.push_back({left_, {0, numel_}});
    if (right_ != left_) options.sources.push_back({right_, {0, numel_}});
    options.sources.push_back({context_.group.rank(), {0, numel_}});
    options.targets = options.sources;
    return options;
  }

  const void* difference(Range chunk) {
    kernels::cast(dtype_, at(data_, chunk.begin, item_bytes(dtype_)), DType::kF32, difference_, chunk.numel,
                  context_.stream);
    const void* sources[] = {difference_, replicas_.left + chunk.begin, replicas_.right + chunk.begin,
                             replicas_.own + chunk.begin};
    const double weights[] = {1.0, 1.0 / 3.0, 1.0 / 3.0, -5.0 / 3.0};
    kernels::weighted_sum(DType::kF32, sources, weights, 4, difference_, chunk.numel, context_.stream);
    return difference_;
  }

  void take(const PairwiseExchange::Arrival& arrival) {
    const Range range = arrival.range;
    const EventSpan span(context_.events, EventKind::kDecode, range.numel * sizeof(float));
    const bool is_own = arrival.rank == context_.group.rank();
    float* const replica = is_own ? replicas_.own : arrival.rank == left_ ? replicas_.left : replicas_.right;
    codec_.decode_add(arrival.bytes, DType::kF32, range.numel, replica + range.begin, context_.stream);
    if (arrival.rank == right_ && right_ == left_ && replicas_.right != replicas_.left) {
      codec_.decode_add(arrival.bytes, DType::kF32, range.numel, replicas_.right + range.begin, context_.stream);
    }
    if (is_own) {
      kernels::cast(DType::kF32, replica + range.begin, dtype_, at(data_, range.begin, item_bytes(dtype_)), range.numel,
                    context_.stream);
    }
  }

  Context& context_;
  void* const data_;
  const size_t numel_;
  const DType dtype_;
  const Replicas replicas_;
  const Codec& codec_;
  const int left_;
  const int right_;
  PairwiseExchange exchange_;
  float* difference_;
};

}  // namespace

size_t difference_ring_average(Context& context, void* data, size_t numel, DType dtype, const Replicas& replicas,
                               const Codec& codec) {
  require_compressible("difference_ring_average", codec, dtype);
  if (context.group.size() == 1 || numel == 0) return 0;
  return DifferenceRing(context, data, numel, dtype, replicas, codec).run();
}

}  // namespace bagua::collectives

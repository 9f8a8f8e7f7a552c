// neighbor_average: D_FP_S and D_LP_S of the paper (arXiv 2107.01499), x_i <- sum over neighbours and self of
// w_ij x_j, the neighbours' values as they are or through a codec; the own ones always as they are.
//
// 1 step; the tensor (its codes) to every target, in chunks (exchange.h). Neighbours are added in the order of
// their ranks, in f64, and rounded once (kernels/weighted_sum.h). Where every rank averages with every rank at full
// precision it is an all_reduce, whose bytes do not grow with n, and which adds f32 in f32.
//
// The neighbours are decided elsewhere (rust_core/src/topology.rs): this file only takes their weights.
#include <string>

#include "csrc/collectives/exchange.h"
#include "csrc/device/memory.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/weighted_sum.h"

namespace bagua::collectives {
namespace {

class NeighborAverage {
 public:
  NeighborAverage(Context& context, void* data, size_t numel, DType dtype, const std::vector<Neighbor>& neighbors,
                  const Codec* codec)
      : context_(context),
        data_(data),
        numel_(numel),
        dtype_(dtype),
        codec_(codec),
        sum_dtype_(codec == nullptr ? dtype : DType::kF32),
        exchange_(context, options(neighbors)) {
    for (const Neighbor& neighbor : neighbors) {
      if (neighbor.weight == 0 && !neighbor.is_source) continue;  // only sent to
      is_own_.push_back(neighbor.rank == context.group.rank());
      weights_.push_back(neighbor.weight);
    }
    // Decoded values of every source and the widened own ones.
    const size_t chunk_numel = std::min(numel, exchange_.chunk_numel());
    if (codec != nullptr) {
      decoded_ =
          reinterpret_cast<float*>(context.workspace.get(kAccumulator, weights_.size() * chunk_numel * sizeof(float)));
    }
  }

  size_t run() {
    return exchange_.run([this](size_t k, const auto& arrivals) { average(k, arrivals); });
  }

 private:
  ExchangeOptions options(const std::vector<Neighbor>& neighbors) const {
    ExchangeOptions options{data_, dtype_, codec_, {}, {}, /*same_for_all=*/true};
    for (const Neighbor& neighbor : neighbors) {
      if (neighbor.is_target) options.targets.push_back({neighbor.rank, {0, numel_}});
      if (neighbor.is_source) options.sources.push_back({neighbor.rank, {0, numel_}});
    }
    return options;
  }

  void average(size_t k, const std::vector<PairwiseExchange::Arrival>& arrivals) {
    const Range range = chunk_of({0, numel_}, exchange_.chunk_numel(), k);
    void* own = at(data_, range.begin, item_bytes(dtype_));
    const EventSpan span(context_.events, codec_ != nullptr ? EventKind::kDecode : EventKind::kReduce,
                         arrivals.size() * range.numel * item_bytes(dtype_));
    sources_.clear();
    auto arrival = arrivals.begin();
    for (size_t s = 0; s < weights_.size(); ++s) {
      sources_.push_back(is_own_[s] ? own_values(own, s, range.numel) : values_of((arrival++)->bytes, s, range.numel));
    }
    void* result = sum_dtype_ == dtype_ ? own : decoded(0);
    kernels::weighted_sum(sum_dtype_, sources_.data(), weights_.data(), static_cast<int>(weights_.size()), result,
                          range.numel, context_.stream);
    if (result != own) kernels::cast(sum_dtype_, result, dtype_, own, range.numel, context_.stream);
  }

  float* decoded(size_t s) const { return decoded_ + s * std::min(numel_, exchange_.chunk_numel()); }

  const void* own_values(const void* own, size_t s, size_t numel) const {
    if (sum_dtype_ == dtype_) return own;
    kernels::cast(dtype_, own, sum_dtype_, decoded(s), numel, context_.stream);
    return decoded(s);
  }

  const void* values_of(const uint8_t* bytes, size_t s, size_t numel) const {
    if (codec_ == nullptr) return bytes;
    device::fill_zero(decoded(s), numel * sizeof(float), context_.stream);
    codec_->decode_add(bytes, dtype_, numel, decoded(s), context_.stream);
    return decoded(s);
  }

  Context& context_;
  void* const data_;
  const size_t numel_;
  const DType dtype_;
  const Codec* const codec_;
  const DType sum_dtype_;
  PairwiseExchange exchange_;
  std::vector<char> is_own_;  // by term of the sum, as the next
  std::vector<double> weights_;
  std::vector<const void*> sources_;
  float* decoded_ = nullptr;
};

}  // namespace

void require_average(DType dtype, const Codec* codec) {
  if (codec != nullptr) require_compressible("neighbor_average", *codec, dtype);
  if (is_floating(dtype)) return;
  throw Error(ErrorKind::kInvalidArgument,
              "neighbor_average got " + std::string(dtype_name(dtype)) +
                  ", which has no averages; convert the tensor to a floating type",
              -1, "neighbor_average");
}

bool is_mean_of_all(const std::vector<Neighbor>& neighbors, int size) {
  if (neighbors.size() != static_cast<size_t>(size)) return false;
  for (const Neighbor& neighbor : neighbors) {
    if (neighbor.weight != neighbors[0].weight) return false;
  }
  return true;
}

size_t exchange_average(Context& context, void* data, size_t numel, DType dtype, const std::vector<Neighbor>& neighbors,
                        const Codec* codec) {
  return NeighborAverage(context, data, numel, dtype, neighbors, codec).run();
}

size_t neighbor_average(Context& context, void* data, size_t numel, DType dtype, const std::vector<Neighbor>& neighbors,
                        const Codec* codec, const InputSegments& segments) {
  require_average(dtype, codec);
  segments.copy_to(data, numel, item_bytes(dtype), context.stream);
  const int size = context.group.size();
  if (size == 1 || numel == 0) return 0;
  if (codec == nullptr && is_mean_of_all(neighbors, size)) {
    return all_reduce(context, data, numel, dtype, ReduceOp::kAvg, nullptr);
  }
  return exchange_average(context, data, numel, dtype, neighbors, codec);
}

}  // namespace bagua::collectives

// Reduction by stripes; see stripes.h.
#include "csrc/collectives/stripes.h"

#include "csrc/collectives/two_shot_pipeline.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {

StripeReduction::StripeReduction(Context& context, const StripesOptions& options)
    : context_(context),
      options_(options),
      size_(static_cast<size_t>(context.group.size())),
      rank_(static_cast<size_t>(context.group.rank())),
      item_(item_bytes(options.dtype)),
      chunks_(
          stripe_chunks(partition(options.numel, size_, 0).numel, item_, context.group.size(), context.chunk_scale())),
      requests_(context.group, kRoundsInFlight * kNumTransfers * size_) {
  const size_t chunk_bytes = chunks_.numel * item_;
  received_chunks_ = context.workspace.get(kReceived, kRoundsInFlight * size_ * chunk_bytes);
  if (options.results == nullptr && options.own_result == nullptr) {
    passed_on_ = context.workspace.get(kAccumulator, kRoundsInFlight * chunk_bytes);
  }
  sources_ = reinterpret_cast<const void**>(host_tables(context, size_ * sizeof(void*)));
}

void StripeReduction::run() { run_two_shot(chunks_.count, *this); }

Range StripeReduction::chunk(size_t rank, size_t k) const {
  return chunk_of(partition(options_.numel, size_, rank), chunks_.numel, k);
}

size_t StripeReduction::slot(size_t k, Transfer transfer, size_t peer) const {
  return (k % kRoundsInFlight * kNumTransfers + transfer) * size_ + peer;
}

uint8_t* StripeReduction::received(size_t k, size_t peer) const {
  return at(received_chunks_, (k % kRoundsInFlight * size_ + peer) * chunks_.numel, item_);
}

void* StripeReduction::reduced(size_t k) const {
  if (options_.results != nullptr) return at(options_.results, chunk(rank_, k).begin, item_);
  if (options_.own_result != nullptr) return at(options_.own_result, k * chunks_.numel, item_);
  return at(passed_on_, k % kRoundsInFlight * chunks_.numel, item_);
}

bool StripeReduction::sends_results_to(size_t peer) const {
  if (options_.receivers == StripesOptions::Receivers::kEverybody) return true;
  return options_.receivers == StripesOptions::Receivers::kRoot && peer == static_cast<size_t>(options_.root);
}

bool StripeReduction::receives_results() const { return sends_results_to(rank_); }

void StripeReduction::post_contributions(size_t k) {
  const size_t my_bytes = chunk(rank_, k).numel * item_;
  // Starting after the own rank spreads the load: not every rank begins with rank 0.
  for (size_t step = 1; step < size_; ++step) {
    const size_t from = (rank_ + size_ - step) % size_;
    requests_.recv(slot(k, kRecvContribution, from), static_cast<int>(from), received(k, from), my_bytes);
    const size_t to = (rank_ + step) % size_;
    const Range theirs = chunk(to, k);
    requests_.send(slot(k, kSendContribution, to), static_cast<int>(to), at(options_.input, theirs.begin, item_),
                   theirs.numel * item_);
  }
}

void StripeReduction::reduce(size_t k) {
  // The sends too: their memory receives the results.
  requests_.wait_range(slot(k, kSendContribution, 0), slot(k, kRecvContribution, 0) + size_);
  const Range mine = chunk(rank_, k);
  for (size_t r = 0; r < size_; ++r) {
    sources_[r] = r == rank_ ? at(options_.input, mine.begin, item_) : received(k, r);
  }
  void* destination = reduced(k);
  kernels::reduce_many(options_.op, options_.dtype, sources_, context_.group.size(), &destination, 1, mine.numel,
                       context_.stream);
}

void StripeReduction::post_results(size_t k) {
  const size_t my_bytes = chunk(rank_, k).numel * item_;
  for (size_t step = 1; step < size_; ++step) {
    const size_t from = (rank_ + size_ - step) % size_;
    if (receives_results()) {
      const Range theirs = chunk(from, k);
      requests_.recv(slot(k, kRecvResult, from), static_cast<int>(from), at(options_.results, theirs.begin, item_),
                     theirs.numel * item_);
    }
    const size_t to = (rank_ + step) % size_;
    if (sends_results_to(to)) requests_.send(slot(k, kSendResult, to), static_cast<int>(to), reduced(k), my_bytes);
  }
}

void StripeReduction::take_results(size_t k) {
  requests_.wait_range(slot(k, kSendResult, 0), slot(k, kRecvResult, 0) + size_);
}

}  // namespace bagua::collectives

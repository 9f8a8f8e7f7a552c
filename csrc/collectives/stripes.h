// Reduction by stripes: rank j owns the j-th of n stripes, receives every rank's values for it, reduces them
// in rank order in one go (f16 and bf16 in f32, rounded once) and hands the result on. It is the two-shot
// all_reduce, the large reduce and the small reduce_scatter, which differ in who gets the results.
//
// Values travel as they are, in rounds of one chunk per stripe (two_shot_pipeline.h); workspace: two chunks per rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"

namespace bagua::collectives {

struct StripesOptions {
  const void* input = nullptr;  // all stripes, of this rank
  size_t numel = 0;             // of all stripes
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  // Gets the results of all stripes on the ranks that receive them, and may be `input`; otherwise nullptr.
  void* results = nullptr;
  // Gets the result of the own stripe only, if `results` is nullptr; nullptr where the result is only passed on.
  void* own_result = nullptr;
  enum class Receivers { kNobody, kRoot, kEverybody } receivers = Receivers::kEverybody;
  int root = -1;
};

class StripeReduction {
 public:
  StripeReduction(Context& context, const StripesOptions& options);
  void run();

  // Called by run_two_shot.
  void post_contributions(size_t k);
  void reduce(size_t k);
  void post_results(size_t k);
  void take_results(size_t k);

 private:
  enum Transfer : size_t { kSendContribution = 0, kRecvContribution, kSendResult, kRecvResult, kNumTransfers };

  Range chunk(size_t rank, size_t k) const;
  size_t slot(size_t k, Transfer transfer, size_t peer) const;
  uint8_t* received(size_t k, size_t peer) const;
  void* reduced(size_t k) const;
  bool sends_results_to(size_t peer) const;
  bool receives_results() const;

  Context& context_;
  const StripesOptions options_;
  const size_t size_;
  const size_t rank_;
  const size_t item_;
  const Chunks chunks_;
  uint8_t* received_chunks_;      // by round in flight and rank
  uint8_t* passed_on_ = nullptr;  // by round in flight, where reduced chunks wait to be sent
  const void** sources_;
  PostedRequests requests_;
};

}  // namespace bagua::collectives

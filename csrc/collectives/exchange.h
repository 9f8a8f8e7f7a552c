// PairwiseExchange: every rank sends a part of its values to some ranks and receives parts from some, chunk
// by chunk, encoded or as they are. What the compressed collectives and neighbor_average have in common.
//
// Round k posts chunk k to and from every peer, encoding it, then takes in what round k-1 has brought, so
// that coding and travelling overlap. Chunks are cut at multiples of the codec's block, by a size that
// depends on the group only: both ends of a message cut alike, and the bytes do not depend on the cutting.
// Workspace: two chunks per peer, however large the tensor.
#pragma once

#include <functional>
#include <vector>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/kernels/fused.h"

namespace bagua::collectives {

struct ExchangeOptions {
  struct PeerRange {
    int rank;
    Range range;
  };
  const void* input = nullptr;
  DType dtype = DType::kF32;
  const Codec* codec = nullptr;  // null: values travel as they are, straight from `input`
  // Elements `range` of `input` go to `rank`; that many come from `rank`. With a codec the own rank may be in both:
  // its part then passes through the codec too, but through no channel.
  std::vector<PeerRange> targets;
  std::vector<PeerRange> sources;
  bool same_for_all = false;  // all targets get the same range, which is encoded once
  // Gives, where set, the values to encode: called once per chunk of `input`, which it may read; valid until the next
  // call.
  std::function<const void*(Range chunk)> prepare = {};
  // Under a codec, where it is not 0: every range is rows of so many elements, each of which is a message by itself.
  size_t row_numel = 0;
  // Under a codec, where it is on: of all of `input`, which is added to it and renewed. The codes are then those of
  // f32.
  kernels::Residual residual = {};
};

class PairwiseExchange {
 public:
  struct Arrival {
    int rank;
    Range range;           // the chunk, inside the source's range
    const uint8_t* bytes;  // valid until the next round
  };

  PairwiseExchange(Context& context, ExchangeOptions options);

  // Calls `take(chunk index, arrivals)` round by round, the arrivals in the order of the sources, some possibly empty.
  // By then that chunk of `input` has left and may be overwritten. Returns how many blocks of `input` held a NaN or
  // an Inf.
  template <typename Take>
  size_t run(Take take) {
    if (num_rounds_ > 0) post(0);
    for (size_t k = 0; k < num_rounds_; ++k) {
      if (k + 1 < num_rounds_) post(k + 1);
      wait(k);
      take(k, arrivals(k));
    }
    return num_nonfinite_blocks_;
  }

  size_t chunk_numel() const { return chunk_numel_; }
  // Decodes what has arrived.
  void decode(const Arrival& arrival, void* destination) const;

 private:
  static constexpr size_t kInFlight = 2;
  using PeerRange = ExchangeOptions::PeerRange;

  bool is_own(const PeerRange& one) const { return one.rank == context_.group.rank(); }
  Range chunk(const PeerRange& one, size_t k) const { return chunk_of(one.range, chunk_numel_, k); }
  DType sent_dtype() const { return options_.residual.is_on() ? DType::kF32 : options_.dtype; }
  size_t granule() const;
  size_t wire_bytes(size_t numel) const;
  uint8_t* sent(size_t k, size_t target) const;
  uint8_t* received(size_t k, size_t source) const;
  size_t request(size_t k, size_t index) const;
  void post(size_t k);
  const void* outgoing(size_t k, size_t target);
  void encode(Range range, Range chunk, uint8_t* bytes);  // a chunk of the range
  void wait(size_t k);
  const std::vector<Arrival>& arrivals(size_t k);

  Context& context_;
  const ExchangeOptions options_;
  const size_t num_sent_;  // buffers for outgoing codes
  const size_t chunk_numel_;
  size_t num_rounds_ = 0;
  size_t slot_bytes_ = 0;  // of one chunk's buffer
  uint8_t* sent_ = nullptr;
  uint8_t* received_ = nullptr;
  size_t num_nonfinite_blocks_ = 0;
  std::vector<Arrival> arrivals_;
  PostedRequests requests_;
};

}  // namespace bagua::collectives

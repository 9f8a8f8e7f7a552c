// Choices and chunk sizes; see selector.h.
#include "csrc/collectives/selector.h"

#include <algorithm>

#include "csrc/collectives/chunking.h"

namespace bagua::collectives {
namespace {

constexpr size_t KiB = 1024;
constexpr size_t MiB = 1024 * KiB;

// More ranks than this exchange blocks around the ring even if small: a connection to every rank costs more.
constexpr int kMaxPairwiseRanks = 16;

// Chunks are large enough that a message's fixed cost (a few microseconds) disappears and small enough that
// sender, wire and receiver overlap within the second-level cache. All of these are the CPU's; a device has larger ones
// (Thresholds::device_chunk_scale) where something is computed per chunk.
constexpr size_t kMinRingChunkBytes = 32 * KiB, kMaxRingChunkBytes = 512 * KiB;
constexpr size_t kMinStripeChunkBytes = 16 * KiB, kMaxStripeChunkBytes = 512 * KiB;
constexpr size_t kStripeWorkspaceBytes = 4 * MiB;
constexpr size_t kMinCodecChunkNumel = 8 * KiB, kMaxCodecChunkNumel = 128 * KiB;
// The least elements of a round, in which every rank waits for all others twice: on hosts that share two cores that
// takes 0.4 to 1 ms, and codes of 4 bits are on a wire of 1 Gbit/s for 0.26 ms per 64 Ki elements. From 1 Mi elements
// on, rounds are smaller again, so that the workspace is no larger than the codes of the tensor; below it is three
// times that at most.
constexpr size_t kMinRoundChunkNumel = 64 * KiB, kFewRoundsNumel = MiB;
// The codes under way are about six chunks for every rank: at 8 bits 3 MiB at most, however large the tensor.
constexpr size_t kCodecRoundNumel = 512 * KiB;
constexpr size_t kMinStagedChunkBytes = 64 * KiB;

// About `wanted` equal chunks, within the limits.
Chunks plan(size_t numel, size_t wanted, size_t min_numel, size_t max_numel, size_t granule) {
  if (numel == 0) return {};
  const size_t target = std::clamp(divide_up(numel, wanted), min_numel, std::max(min_numel, max_numel));
  const size_t count = divide_up(numel, round_up(target, granule));
  const size_t chunk = round_up(divide_up(numel, count), granule);
  return {chunk, divide_up(numel, chunk)};
}

}  // namespace

bool asks_for_shared_memory(const Thresholds& thresholds, size_t bytes) {
  return bytes > std::min(thresholds.recursive_doubling_bytes, thresholds.direct_bytes);
}

AllReduceAlgorithm select_all_reduce(const Thresholds& thresholds, size_t bytes, DType dtype, Reach reach) {
  if (reach == Reach::kNative) return AllReduceAlgorithm::kNative;
  if (bytes <= thresholds.recursive_doubling_bytes) return AllReduceAlgorithm::kRecursiveDoubling;
  if (reach == Reach::kSharedMemory) return AllReduceAlgorithm::kDirect;
  // A ring rounds at every hop; two shots add in f32 and round once for the same bytes.
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16;
  return is_half ? AllReduceAlgorithm::kTwoShot : AllReduceAlgorithm::kRing;
}

ReduceScatterAlgorithm select_reduce_scatter(const Thresholds& thresholds, size_t block_bytes, DType dtype, int size,
                                             Reach reach) {
  if (reach == Reach::kNative) return ReduceScatterAlgorithm::kNative;
  if (reach == Reach::kSharedMemory && block_bytes > thresholds.direct_bytes) return ReduceScatterAlgorithm::kDirect;
  if (dtype == DType::kF16 || dtype == DType::kBF16) return ReduceScatterAlgorithm::kStripes;
  const bool pairwise = size == 2 || (block_bytes <= thresholds.pairwise_bytes && size <= kMaxPairwiseRanks);
  return pairwise ? ReduceScatterAlgorithm::kStripes : ReduceScatterAlgorithm::kRing;
}

AllGatherAlgorithm select_all_gather(const Thresholds& thresholds, size_t block_bytes, int size, Reach reach) {
  if (reach == Reach::kNative) return AllGatherAlgorithm::kNative;
  if (reach == Reach::kSharedMemory && block_bytes > thresholds.direct_bytes) return AllGatherAlgorithm::kDirect;
  const bool pairwise = size == 2 || (block_bytes <= thresholds.pairwise_bytes && size <= kMaxPairwiseRanks);
  return pairwise ? AllGatherAlgorithm::kPairwise : AllGatherAlgorithm::kRing;
}

BroadcastAlgorithm select_broadcast(const Thresholds& thresholds, size_t bytes, int size, Reach reach) {
  if (reach == Reach::kNative) return BroadcastAlgorithm::kNative;
  if (reach == Reach::kSharedMemory && bytes > thresholds.direct_bytes) return BroadcastAlgorithm::kDirect;
  return size == 2 || bytes <= thresholds.broadcast_tree_bytes ? BroadcastAlgorithm::kTree : BroadcastAlgorithm::kChain;
}

ReduceAlgorithm select_reduce(const Thresholds& thresholds, size_t bytes, Reach reach) {
  if (reach == Reach::kNative) return ReduceAlgorithm::kNative;
  if (reach == Reach::kSharedMemory && bytes > thresholds.direct_bytes) return ReduceAlgorithm::kDirect;
  return bytes <= thresholds.reduce_tree_bytes ? ReduceAlgorithm::kTree : ReduceAlgorithm::kStripes;
}

Chunks ring_chunks(size_t block_numel, size_t item, size_t scale) {
  return plan(block_numel, kRingLookahead + 1, scale * kMinRingChunkBytes / item, scale * kMaxRingChunkBytes / item,
              64 / item);
}

Chunks ring_window_chunks(size_t block_numel, size_t item, size_t scale) {
  constexpr size_t window = kRingLookahead + 1;
  const size_t most = scale * kMaxRingChunkBytes / 2 / item, granule = 64 / item;
  const Chunks chunks = plan(block_numel, window, scale * kMinRingChunkBytes / item, most, granule);
  return chunks.count <= window ? chunks : plan(block_numel, round_up(chunks.count, window), granule, most, granule);
}

Chunks stripe_chunks(size_t stripe_numel, size_t item, int size, size_t scale) {
  const size_t fair = kStripeWorkspaceBytes / (2 * static_cast<size_t>(size));
  const size_t most = scale * std::clamp(fair, kMinStripeChunkBytes, kMaxStripeChunkBytes);
  return plan(stripe_numel, 4, scale * kMinStripeChunkBytes / item, most / item, 64 / item);
}

Chunks chain_chunks(size_t bytes) { return plan(bytes, 8, kMinRingChunkBytes, kMaxRingChunkBytes, 64); }

Chunks codec_chunks(size_t stripe_numel, size_t block_numel, int size, size_t scale) {
  const size_t most = exchange_chunk_numel(1, size, scale);
  const bool is_small = stripe_numel * static_cast<size_t>(size) < scale * kFewRoundsNumel;
  const size_t least = is_small ? std::min(scale * kMinRoundChunkNumel, most) : scale * kMinCodecChunkNumel;
  return plan(stripe_numel, 8, least, most, block_numel);
}

Chunks codec_chain_chunks(size_t numel, size_t block_numel, size_t scale) {
  return plan(numel, 8, scale * kMinCodecChunkNumel, scale * kMaxCodecChunkNumel, block_numel);
}

size_t exchange_chunk_numel(size_t block_numel, int size, size_t scale) {
  const size_t fair = kCodecRoundNumel / static_cast<size_t>(size);
  return round_up(scale * std::clamp(fair, kMinCodecChunkNumel, kMaxCodecChunkNumel), block_numel);
}

Chunks staged_chunks(size_t numel, size_t item) {
  return plan(numel, 4, kMinStagedChunkBytes / item, kMaxStagedChunkBytes / item, 64 / item);
}

}  // namespace bagua::collectives

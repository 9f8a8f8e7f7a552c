// The choice of the algorithm (by the thresholds.h) and of the chunks. Pure functions of what all ranks know alike, so
// that all ranks choose alike.
#pragma once

#include <cstddef>

#include "csrc/collectives/thresholds.h"
#include "csrc/common/dtype.h"

namespace bagua::collectives {

enum class AllReduceAlgorithm { kRecursiveDoubling, kRing, kTwoShot, kDirect, kNative };
enum class ReduceScatterAlgorithm { kStripes, kRing, kDirect, kNative };
enum class AllGatherAlgorithm { kPairwise, kRing, kDirect, kNative };
enum class BroadcastAlgorithm { kTree, kChain, kDirect, kNative };
enum class ReduceAlgorithm { kTree, kStripes, kDirect, kNative };

// How the ranks reach one another's tensors: by messages; in shared memory, which all of them can address; or by a
// transport that does the whole collective by itself.
enum class Reach { kMessages, kSharedMemory, kNative };

// `bytes` is what the selection that follows counts. False means that the answer does not depend on shared memory,
// which spares small operations the look at it (it may connect to every rank).
bool asks_for_shared_memory(const Thresholds& thresholds, size_t bytes);

AllReduceAlgorithm select_all_reduce(const Thresholds& thresholds, size_t bytes, DType dtype, Reach reach);
// `block_bytes` is one rank's output.
ReduceScatterAlgorithm select_reduce_scatter(const Thresholds& thresholds, size_t block_bytes, DType dtype, int size,
                                             Reach reach);
// `block_bytes` is one rank's input.
AllGatherAlgorithm select_all_gather(const Thresholds& thresholds, size_t block_bytes, int size, Reach reach);
BroadcastAlgorithm select_broadcast(const Thresholds& thresholds, size_t bytes, int size, Reach reach);
ReduceAlgorithm select_reduce(const Thresholds& thresholds, size_t bytes, Reach reach);

// Chunks of a range: `count` of `numel` elements each, the last ones short or empty; count 0 for nothing.
struct Chunks {
  size_t numel = 0;
  size_t count = 0;
};
// `scale` is Context::chunk_scale of all ranks. `block_numel` is the largest block; elements of `item` bytes.
Chunks ring_chunks(size_t block_numel, size_t item, size_t scale);
// The same where windows of kRingLookahead + 1 chunks go around one after the other, and two are kept: at most half as
// large, and equal, so that the last window is full too.
Chunks ring_window_chunks(size_t block_numel, size_t item, size_t scale);
Chunks stripe_chunks(size_t stripe_numel, size_t item, int size, size_t scale);
Chunks chain_chunks(size_t bytes);
// Cut at multiples of the codec's block, so that the bytes do not depend on the cutting.
Chunks codec_chunks(size_t stripe_numel, size_t block_numel, int size, size_t scale);
// The same of a whole tensor that is passed along a chain.
Chunks codec_chain_chunks(size_t numel, size_t block_numel, size_t scale);
// Depends on nothing that differs between two ranks that exchange ranges.
size_t exchange_chunk_numel(size_t block_numel, int size, size_t scale);
// The size of the whole tensor, not of a stripe.
Chunks staged_chunks(size_t numel, size_t item);

// How many chunks beyond the current one a ring or a chain has under way.
inline constexpr size_t kRingLookahead = 3;
inline constexpr size_t kChainLookahead = 3;
// Up to this many ranks a barrier is one step.
inline constexpr int kMaxPairwiseBarrierRanks = 8;
// Steps of all_to_all, gather and scatter that are under way together.
inline constexpr size_t kPairwiseWindow = 8;
// Staged all_reduce: how many chunks later a stage runs than the one before it (see its file).
inline constexpr size_t kStagedLag = 2;
inline constexpr size_t kMaxStagedChunkBytes = 512 << 10;

}  // namespace bagua::collectives

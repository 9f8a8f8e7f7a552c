// Cutting and choosing: ranges and chunks cover everything once, in bounds, and what is chosen is legal.
#include <gtest/gtest.h>

#include "csrc/collectives/chunking.h"
#include "csrc/collectives/selector.h"
#include "csrc/common/error.h"

namespace bagua::collectives {
namespace {

constexpr Thresholds kDefaults;
const size_t kNumels[] = {0, 1, 2, 7, 31, 64, 1023, 1025, 4096, (1 << 16) + 1, 1 << 20, size_t{3} << 32};

TEST(Pieces, CoverEverythingOnceCutAtTheGranule) {
  for (const size_t numel : kNumels) {
    for (const size_t count : {1, 2, 3, 5, 8, 1000}) {
      for (const size_t granule : {1, 16, 2048}) {
        size_t next = 0;
        for (size_t i = 0; i < count; ++i) {
          const Range range = partition(numel, count, i, granule);
          EXPECT_EQ(range.begin, next);
          EXPECT_TRUE(range.begin % granule == 0 || range.begin == numel);
          EXPECT_LE(range.numel, partition(numel, count, 0, granule).numel);
          next += range.numel;
        }
        EXPECT_EQ(next, numel);
      }
    }
  }
}

constexpr size_t kScales[] = {1, 8};

void expect_chunks_cover_a_piece_once(size_t scale) {
  for (const size_t numel : kNumels) {
    for (const int size : {2, 3, 8, 100}) {
      for (const Chunks chunks :
           {ring_chunks(numel, 4, scale), ring_chunks(numel, 1, scale), ring_window_chunks(numel, 4, scale),
            stripe_chunks(numel, 2, size, scale), codec_chunks(numel, 2048, size, scale),
            codec_chain_chunks(numel, 2048, scale), staged_chunks(numel, 8), chain_chunks(numel)}) {
        EXPECT_GE(chunks.numel * chunks.count, numel);
        EXPECT_TRUE(numel == 0 || chunks.numel * (chunks.count - 1) < numel);
        EXPECT_EQ(chunks.count == 0, numel == 0);
        const Range last = chunk_of({10, numel}, chunks.numel, chunks.count == 0 ? 0 : chunks.count - 1);
        EXPECT_EQ(last.begin + last.numel, 10 + numel);
        EXPECT_EQ(chunk_of({10, numel}, chunks.numel, chunks.count).numel, 0u);
      }
    }
  }
}

TEST(Pieces, ChunksCoverAPieceOnce) {
  for (const size_t scale : kScales) expect_chunks_cover_a_piece_once(scale);
}

TEST(Pieces, ChunksKeepTheirBounds) {
  for (const size_t numel : kNumels) {
    for (const int size : {2, 3, 8, 100}) {
      for (const size_t scale : kScales) {
        EXPECT_EQ(codec_chunks(numel, 2048, size, scale).numel % 2048, 0u);
        EXPECT_EQ(codec_chain_chunks(numel, 2048, scale).numel % 2048, 0u);
        EXPECT_EQ(exchange_chunk_numel(2048, size, scale) % 2048, 0u);
      }
      EXPECT_LE(staged_chunks(numel, 4).numel * 4, kMaxStagedChunkBytes);
      EXPECT_LE(staged_chunks(numel, 1).numel, kMaxStagedChunkBytes);
    }
  }
}

TEST(Pieces, ADeviceHasFewOfThem) {
  constexpr size_t kNumel = size_t{8} << 20;
  EXPECT_EQ(codec_chunks(kNumel, 2048, 2, 1).count, 64u);
  EXPECT_EQ(codec_chunks(kNumel, 2048, 2, 8).count, 8u);
  EXPECT_EQ(ring_chunks(kNumel, 4, 1).count, 64u);
  EXPECT_EQ(ring_chunks(kNumel, 4, 8).count, 8u);
}

TEST(Selector, HalvesNeverTakeTheRing) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const size_t bytes : kNumels) {
      for (const int size : {2, 3, 64}) {
        EXPECT_NE(select_all_reduce(kDefaults, bytes, dtype, Reach::kMessages), AllReduceAlgorithm::kRing);
        EXPECT_NE(select_reduce_scatter(kDefaults, bytes, dtype, size, Reach::kMessages),
                  ReduceScatterAlgorithm::kRing);
      }
    }
  }
}

TEST(Selector, DirectNeedsSharedMemoryAndTheQuestionHasBeenAsked) {
  for (const size_t bytes : kNumels) {
    for (const int size : {2, 3, 64}) {
      EXPECT_NE(select_all_reduce(kDefaults, bytes, DType::kF32, Reach::kMessages), AllReduceAlgorithm::kDirect);
      EXPECT_NE(select_reduce_scatter(kDefaults, bytes, DType::kF32, size, Reach::kMessages),
                ReduceScatterAlgorithm::kDirect);
      EXPECT_NE(select_all_gather(kDefaults, bytes, size, Reach::kMessages), AllGatherAlgorithm::kDirect);
      EXPECT_NE(select_broadcast(kDefaults, bytes, size, Reach::kMessages), BroadcastAlgorithm::kDirect);
      EXPECT_NE(select_reduce(kDefaults, bytes, Reach::kMessages), ReduceAlgorithm::kDirect);
      if (asks_for_shared_memory(kDefaults, bytes)) continue;
      EXPECT_NE(select_all_reduce(kDefaults, bytes, DType::kF32, Reach::kSharedMemory), AllReduceAlgorithm::kDirect);
      EXPECT_NE(select_reduce_scatter(kDefaults, bytes, DType::kF32, size, Reach::kSharedMemory),
                ReduceScatterAlgorithm::kDirect);
      EXPECT_NE(select_all_gather(kDefaults, bytes, size, Reach::kSharedMemory), AllGatherAlgorithm::kDirect);
      EXPECT_NE(select_broadcast(kDefaults, bytes, size, Reach::kSharedMemory), BroadcastAlgorithm::kDirect);
      EXPECT_NE(select_reduce(kDefaults, bytes, Reach::kSharedMemory), ReduceAlgorithm::kDirect);
    }
  }
}

TEST(Selector, LargeTensorsUseSharedMemoryWhereThereIsSome) {
  const size_t bytes = 100 << 20;
  EXPECT_EQ(select_all_reduce(kDefaults, bytes, DType::kF32, Reach::kSharedMemory), AllReduceAlgorithm::kDirect);
  EXPECT_EQ(select_all_reduce(kDefaults, bytes, DType::kF32, Reach::kMessages), AllReduceAlgorithm::kRing);
  EXPECT_EQ(select_all_reduce(kDefaults, bytes, DType::kF16, Reach::kMessages), AllReduceAlgorithm::kTwoShot);
  EXPECT_EQ(select_all_reduce(kDefaults, 64, DType::kF32, Reach::kSharedMemory),
            AllReduceAlgorithm::kRecursiveDoubling);
  EXPECT_EQ(select_broadcast(kDefaults, bytes, 4, Reach::kMessages), BroadcastAlgorithm::kChain);
  EXPECT_EQ(select_reduce(kDefaults, bytes, Reach::kMessages), ReduceAlgorithm::kStripes);
  EXPECT_EQ(select_reduce(kDefaults, bytes, Reach::kSharedMemory), ReduceAlgorithm::kDirect);
  EXPECT_EQ(select_reduce(kDefaults, 64, Reach::kSharedMemory), ReduceAlgorithm::kTree);
}

TEST(Selector, WhatTheTransportDoesByItselfIsLeftToIt) {
  for (const size_t bytes : kNumels) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      EXPECT_EQ(select_all_reduce(kDefaults, bytes, dtype, Reach::kNative), AllReduceAlgorithm::kNative);
      EXPECT_EQ(select_reduce_scatter(kDefaults, bytes, dtype, 3, Reach::kNative), ReduceScatterAlgorithm::kNative);
    }
    EXPECT_EQ(select_all_gather(kDefaults, bytes, 3, Reach::kNative), AllGatherAlgorithm::kNative);
    EXPECT_EQ(select_broadcast(kDefaults, bytes, 3, Reach::kNative), BroadcastAlgorithm::kNative);
    EXPECT_EQ(select_reduce(kDefaults, bytes, Reach::kNative), ReduceAlgorithm::kNative);
  }
}

TEST(Selector, ThresholdsAreSetByName) {
  Thresholds thresholds;
  EXPECT_EQ(thresholds.by_name().size(), sizeof(Thresholds) / sizeof(size_t) - 1)
      << "one but device_chunk_scale has no name";
  thresholds.set("recursive_doubling_bytes", 0);
  EXPECT_EQ(thresholds.by_name().at("recursive_doubling_bytes"), 0u);
  EXPECT_EQ(select_all_reduce(thresholds, 64, DType::kF32, Reach::kMessages), AllReduceAlgorithm::kRing);
  EXPECT_TRUE(asks_for_shared_memory(thresholds, 1));
  try {
    thresholds.set("ring_bytes", 1);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("the thresholds are recursive_doubling_bytes, "), std::string::npos);
  }
}

}  // namespace
}  // namespace bagua::collectives

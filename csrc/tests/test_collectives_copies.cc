// The collectives that only move bytes: every algorithm, group size and length, to the right offset and
// nowhere else.
#include <gtest/gtest.h>

#include "csrc/collectives/algorithms.h"
#include "csrc/tests/test_collectives_values.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using namespace collectives;

const size_t kLengths[] = {0, 1, 3, 31, 33, 1023, 1025, (1 << 16) + 1, 1 << 20, 3333333, 7};
constexpr size_t kMaxLength = 3333333;

// All that a rank ever sends begins at the beginning of this.
const uint8_t* source_of(size_t rank) {
  static const std::vector<Bytes> sources = [] {
    std::vector<Bytes> result(200);
    for (size_t r = 0; r < result.size(); ++r) {
      result[r].resize(r < 8 ? kMaxLength : 5000);
      for (size_t i = 0; i < result[r].size(); ++i) result[r][i] = static_cast<uint8_t>(i * 31 + r * 97 + i / 251);
    }
    return result;
  }();
  return sources[rank].data();
}

Bytes block(size_t rank, size_t bytes) { return Bytes(source_of(rank), source_of(rank) + bytes); }

void require_block(const uint8_t* got, size_t rank, size_t bytes, const std::string& what) {
  if (bytes == 0 || std::memcmp(got, source_of(rank), bytes) == 0) return;
  require(false,
          what + " of " + std::to_string(bytes) + " bytes: the block of rank " + std::to_string(rank) + " differs");
}

class Copies : public ::testing::TestWithParam<int> {
 protected:
  size_t size() const { return static_cast<size_t>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Sizes, Copies, ::testing::Values(1, 2, 3, 4, 5, 8));

void direct_gather(Context& context, const void* input, void* output, size_t bytes) {
  require(direct_all_gather(context, input, output, bytes), "local memory is shared");
}

TEST_P(Copies, AllGather) {
  for (const auto run : {all_gather, pairwise_all_gather, ring_all_gather, direct_gather}) {
    if (size() == 1 && run != all_gather) continue;
    run_world(GetParam(), [&](Context& context, int rank) {
      const auto r = static_cast<size_t>(rank);
      for (const size_t bytes : kLengths) {
        for (const bool in_place : {false, true}) {
          const Bytes input = block(r, bytes);
          Bytes output(size() * bytes, 0xee);
          uint8_t* mine = output.data() + r * bytes;
          if (in_place) std::copy(input.begin(), input.end(), mine);
          perform(operation(OperationKind::kAllGather, DType::kU8, bytes),
                  [&] { run(context, in_place ? mine : input.data(), output.data(), bytes); });
          for (size_t s = 0; s < size(); ++s) require_block(output.data() + s * bytes, s, bytes, "all_gather");
        }
      }
    });
  }
}

void direct_copy(Context& context, void* data, size_t bytes, int root) {
  require(direct_broadcast(context, data, bytes, root), "local memory is shared");
}

TEST_P(Copies, BroadcastFromEveryRoot) {
  for (const auto run : {broadcast, tree_broadcast, chain_broadcast, direct_copy}) {
    if (size() == 1 && run != broadcast) continue;
    run_world(GetParam(), [&](Context& context, int rank) {
      for (int root = 0; root < GetParam(); ++root) {
        for (const size_t bytes : kLengths) {
          Bytes data = block(static_cast<size_t>(rank), bytes);
          perform(operation(OperationKind::kBroadcast, DType::kU8, bytes, ReduceOp::kSum, root),
                  [&] { run(context, data.data(), bytes, root); });
          require_block(data.data(), static_cast<size_t>(root), bytes, "broadcast from " + std::to_string(root));
        }
      }
    });
  }
}

TEST_P(Copies, GatherAndScatterWithEveryRoot) {
  run_world(GetParam(), [&](Context& context, int rank) {
    const auto r = static_cast<size_t>(rank);
    for (int root = 0; root < GetParam(); ++root) {
      for (const size_t bytes : kLengths) {
        const Bytes input = block(r, bytes);
        Bytes gathered(rank == root ? size() * bytes : 0);
        perform(operation(OperationKind::kGather, DType::kU8, bytes, ReduceOp::kSum, root),
                [&] { gather(context, input.data(), gathered.data(), bytes, root); });
        for (size_t s = 0; rank == root && s < size(); ++s) {
          require_block(gathered.data() + s * bytes, s, bytes, "gather");
        }
        Bytes scattered(bytes);
        perform(operation(OperationKind::kScatter, DType::kU8, bytes, ReduceOp::kSum, root),
                [&] { scatter(context, gathered.data(), scattered.data(), bytes, root); });
        require(scattered == input, "scatter is not the inverse of gather");
      }
    }
  });
}

// The bytes that rank `from` sends to rank `to`: uneven, with empty messages, and one large one.
size_t split(size_t from, size_t to) {
  if (from == 1 && to == 0) return 2000003;
  return (from * 7 + to * 13) % 5 * 1023;
}

// Different for every pair; the large one comes from a long source.
Bytes message(size_t from, size_t to) {
  return from == 1 && to == 0 ? block(7, split(1, 0)) : block(100 + from * 10 + to, split(from, to));
}

TEST_P(Copies, AllToAllWithUnevenSplits) {
  run_world(GetParam(), [&](Context& context, int rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<size_t> input_splits, output_splits;
    Bytes input, want;
    for (size_t peer = 0; peer < size(); ++peer) {
      input_splits.push_back(split(r, peer));
      output_splits.push_back(split(peer, r));
      const Bytes out = message(r, peer), in = message(peer, r);
      input.insert(input.end(), out.begin(), out.end());
      want.insert(want.end(), in.begin(), in.end());
    }
    for (int i = 0; i < 3; ++i) {
      Bytes output(want.size());
      perform(operation(OperationKind::kAllToAll),
              [&] { all_to_all(context, input.data(), input_splits, output.data(), output_splits); });
      require(output == want, "all_to_all");
    }
  });
}

TEST(Copies, AllToAllRefusesSplitsThatDoNotFitTheGroup) {
  run_world(2, [](Context& context, int) {
    uint8_t data[8];
    for (const auto& splits : {std::vector<size_t>{4}, std::vector<size_t>{1, 1, 1}}) {
      try {
        all_to_all(context, data, splits, data, {4, 4});
        require(false, "not refused");
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::kInvalidArgument, error.what());
      }
    }
  });
}

TEST_P(Copies, NobodyLeavesTheBarrierBeforeTheLastHasCome) {
  std::vector<std::atomic<int>> arrived(50);
  run_world(GetParam(), [&](Context& context, int rank) {
    for (size_t round = 0; round < arrived.size(); ++round) {
      if (static_cast<int>(round) % GetParam() == rank) std::this_thread::sleep_for(1ms);
      arrived[round].fetch_add(1);
      perform(operation(OperationKind::kBarrier), [&] { barrier(context); });
      require(arrived[round].load() == GetParam(), "a rank has left the barrier early");
    }
  });
}

}  // namespace
}  // namespace bagua::testing

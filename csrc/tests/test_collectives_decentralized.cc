// difference_ring_average, hierarchical_neighbor_average and the residuals of a compressed all_reduce, beside their
// definitions in plain loops; run by the sanitizers.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "csrc/collectives/algorithms.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using collectives::Feedback;
using collectives::Hierarchy;
using collectives::Neighbor;
using collectives::Piece;
using collectives::Replicas;

using Floats = std::vector<float>;

// Different for every rank and step; multiples of 1/8, so that a few steps of sums and halves are exact.
Floats values(int rank, int step, size_t numel) {
  Floats result(numel);
  uint64_t state = static_cast<uint64_t>(1000 * step + rank + 1) * 0x9e3779b97f4a7c15u;
  for (float& value : result) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<int>(state >> 58) - 32) / 8.0f;
  }
  return result;
}

size_t of(int rank) { return static_cast<size_t>(rank); }

class Decentralized : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Sizes, Decentralized, ::testing::Values(1, 2, 3, 4));

TEST_P(Decentralized, ReplicasStayEqual) {
  const int size = GetParam();
  for (const char* name : {"minmax_uint8", "qsgd:bits=4", "bf16"}) {
    const Codec& codec = get_codec(name);
    for (size_t numel : {size_t{0}, size_t{5}, size_t{5000}, size_t{1} << 20}) {
      std::vector<std::array<Floats, 4>> kept(of(size), {Floats(numel), Floats(numel), Floats(numel), Floats(numel)});
      for (int step = 0; step < 3; ++step) {
        const auto before = kept;
        run_world(size, [&](Context& context, int rank) {
          auto& [own, left, right, data] = kept[of(rank)];
          const Floats moved = values(rank, step, numel);
          for (size_t i = 0; i < numel; ++i) data[i] += moved[i];
          context.draw_key = derive_key(of(step), of(rank));
          perform(operation(OperationKind::kDifferenceRingAverage, DType::kF32, numel), [&] {
            return collectives::difference_ring_average(context, data.data(), numel, DType::kF32,
                                                        Replicas{own.data(), left.data(), right.data()}, codec);
          });
        });
        if (size == 1) continue;
        for (int rank = 0; rank < size; ++rank) {
          const auto& [own, left, right, data] = kept[of(rank)];
          ASSERT_EQ(left, kept[of((rank + size - 1) % size)][0]) << name << " " << numel;
          ASSERT_EQ(right, kept[of((rank + 1) % size)][0]) << name << " " << numel;
          ASSERT_EQ(data, own);
          const auto& old = before[of(rank)];
          const Floats moved = values(rank, step, numel);
          for (size_t i = 0; i < numel; i += 97) {
            const double z =
                static_cast<double>(old[3][i] + moved[i]) + old[1][i] / 3.0 + old[2][i] / 3.0 - 5.0 / 3.0 * old[0][i];
            // A step of 4 bits of the block's largest difference, which is below 32 here.
            ASSERT_NEAR(own[i] - old[0][i], z, 32.0 / 7) << name << " " << numel << " at " << i;
          }
        }
      }
    }
  }
}

TEST_P(Decentralized, ResidualsAreWhatWasNotSent) {
  const int size = GetParam();
  if (size == 1) return;
  const Codec& codec = get_codec("topk:k=64");  // keeps values as they are: sums are exact
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (size_t numel : {size_t{7}, size_t{5000}, size_t{300000}}) {
      std::vector<std::vector<uint8_t>> worker(of(size)), owner(of(size));
      std::vector<double> sent(numel), meant(numel);
      for (int step = 0; step < 3; ++step) {
        std::vector<Floats> data(of(size));
        run_world(size, [&](Context& context, int rank) {
          data[of(rank)] = values(rank, step, numel);
          const Piece stripe = collectives::owned_stripe(numel, size, rank, codec);
          worker[of(rank)].resize(numel * item_bytes(dtype));
          owner[of(rank)].resize(std::max<size_t>(1, stripe.numel * item_bytes(dtype)));
          auto next_worker = worker[of(rank)];
          auto next_owner = owner[of(rank)];
          const Feedback feedback{worker[of(rank)].data(), next_worker.data(), owner[of(rank)].data(),
                                  next_owner.data(), dtype};
          perform(operation(OperationKind::kAllReduce, DType::kF32, numel), [&] {
            return collectives::all_reduce(context, data[of(rank)].data(), numel, DType::kF32, ReduceOp::kSum, &codec,
                                           feedback);
          });
          worker[of(rank)] = next_worker;
          owner[of(rank)] = next_owner;
        });
        for (int rank = 0; rank < size; ++rank) {
          ASSERT_EQ(data[of(rank)], data[0]);
          const Floats own = values(rank, step, numel);
          for (size_t i = 0; i < numel; ++i) meant[i] += own[i];
        }
        for (size_t i = 0; i < numel; ++i) sent[i] += data[0][i];
      }
      const auto residual = [&](const std::vector<uint8_t>& bytes, size_t i) {
        if (dtype == DType::kF32) return static_cast<double>(reinterpret_cast<const float*>(bytes.data())[i]);
        const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(bytes.data())[i]) << 16;
        return static_cast<double>(std::bit_cast<float>(bits));
      };
      for (int rank = 0; rank < size; ++rank) {
        for (size_t i = 0; i < numel; ++i) sent[i] += residual(worker[of(rank)], i);
        const Piece stripe = collectives::owned_stripe(numel, size, rank, codec);
        for (size_t i = 0; i < stripe.numel; ++i) sent[stripe.begin + i] += residual(owner[of(rank)], i);
      }
      ASSERT_EQ(sent, meant) << dtype_name(dtype) << " " << numel;
    }
  }
}

TEST(HierarchicalNeighborAverage, KeepsTheMeanOverRanksOfUnequalNodes) {
  const std::vector<std::vector<int>> nodes = {{0}, {1, 2, 3}, {4, 5}, {6, 7}};
  const std::vector<int> leaders = {0, 1, 4, 6};
  const size_t numel = 3000;
  std::vector<Floats> data(8);
  run_world(8, [&](Context& context, int rank) {
    data[of(rank)] = values(rank, 0, numel);
    const auto place = static_cast<int>(
        std::find_if(nodes.begin(), nodes.end(),
                     [&](const auto& node) { return std::find(node.begin(), node.end(), rank) != node.end(); }) -
        nodes.begin());
    std::vector<Neighbor> ring;
    for (int other = 0; other < 4; ++other) {
      if (other == (place + 2) % 4) continue;
      ring.push_back({other, 1.0 / 3, other != place, other != place});
    }
    perform(operation(OperationKind::kNeighborAverage, DType::kF32, numel), [&] {
      return collectives::hierarchical_neighbor_average(context, Hierarchy{nodes[of(place)], leaders}, 1,
                                                        data[of(rank)].data(), numel, DType::kF32, ring);
    });
  });
  for (size_t i = 0; i < numel; ++i) {
    double before = 0, after = 0;
    for (int rank = 0; rank < 8; ++rank) {
      before += values(rank, 0, numel)[i];
      after += data[of(rank)][i];
    }
    ASSERT_NEAR(before, after, 1e-5);
  }
  for (const auto& node : nodes) {
    for (int rank : node) ASSERT_EQ(data[of(rank)], data[of(node[0])]);
  }
  ASSERT_NE(data[0], data[1]);
}

}  // namespace
}  // namespace bagua::testing

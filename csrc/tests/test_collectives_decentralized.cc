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
using collectives::Range;
using collectives::Replicas;

using Floats = std::vector<float>;

// Different for every rank and step; multiples of 1/8, so that a few steps of sums and halves are exact.
Floats weights(int rank, int step, size_t numel) {
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

struct RingCodec {
  const char* name;
  // How far a decoded element may be off, given its value and the block's smallest, largest, and largest magnitude.
  double (*bound)(double value, double low, double high, double norm);
};

const RingCodec kRingCodecs[] = {
    {"bf16", [](double value, double, double, double) { return std::fabs(value) * 0x1p-8; }},
    {"minmax_uint8", [](double, double low, double high, double) { return (high - low) / 510; }},
    {"qsgd:bits=4", [](double, double, double, double norm) { return norm / 7; }},
};

// A rank's own replica, those of its neighbours, and its weights.
using Kept = std::array<Floats, 4>;

// The own replica has moved by z = x + L/3 + R/3 - 5w/3 as the codec encodes it: `before` with the moved x.
void expect_step(const RingCodec& codec, const Kept& before, const Floats& own) {
  const size_t numel = own.size();
  std::vector<double> z(numel);
  for (size_t i = 0; i < numel; ++i) {
    const double w = before[0][i], left = before[1][i], right = before[2][i], x = before[3][i];
    z[i] = x + left / 3 + right / 3 - 5 * w / 3;
  }
  constexpr size_t kBlock = 2048;
  for (size_t begin = 0; begin < numel; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, numel);
    const auto [low, high] = std::minmax_element(z.begin() + static_cast<std::ptrdiff_t>(begin),
                                                 z.begin() + static_cast<std::ptrdiff_t>(end));
    const double norm = std::max(-*low, *high);
    ASSERT_GE(norm, 1.0) << "too small to notice that nothing was sent";
    for (size_t i = begin; i < end; ++i) {
      const double moved = static_cast<double>(own[i]) - static_cast<double>(before[0][i]);
      // Beside the codec's bound the rounding of z, of what is decoded and of the sum to f32, all below 16.
      const double bound = codec.bound(z[i], *low, *high, norm) + 16 * 3 * 0x1p-24;
      if (std::fabs(moved - z[i]) <= bound) continue;  // one assertion per element would take seconds
      FAIL() << codec.name << " x " << numel << " at " << i << ": " << moved << " instead of " << z[i];
    }
  }
}

TEST_P(Decentralized, ReplicasStayEqual) {
  const int size = GetParam();
  for (const RingCodec& ring_codec : kRingCodecs) {
    const Codec& codec = get_codec(ring_codec.name);
    for (size_t numel : {size_t{0}, size_t{5}, size_t{5000}, size_t{300001}}) {
      std::vector<Kept> kept(of(size), {Floats(numel), Floats(numel), Floats(numel), Floats(numel)});
      for (int step = 0; step < 3; ++step) {
        for (int rank = 0; rank < size; ++rank) {
          const Floats moved = weights(rank, step, numel);
          for (size_t i = 0; i < numel; ++i) kept[of(rank)][3][i] += moved[i];
        }
        const auto before = kept;
        run_world(size, [&](Context& context, int rank) {
          auto& [own, left, right, data] = kept[of(rank)];
          context.rng_key = derive_key(of(step), of(rank));
          perform(operation(OperationKind::kDifferenceRingAverage, DType::kF32, numel), [&] {
            return collectives::difference_ring_average(context, data.data(), numel, DType::kF32,
                                                        Replicas{own.data(), left.data(), right.data()}, codec);
          });
        });
        if (size == 1) {
          ASSERT_EQ(kept, before);
          continue;
        }
        for (int rank = 0; rank < size; ++rank) {
          const auto& [own, left, right, data] = kept[of(rank)];
          ASSERT_EQ(left, kept[of((rank + size - 1) % size)][0]) << ring_codec.name << " " << numel;
          ASSERT_EQ(right, kept[of((rank + 1) % size)][0]) << ring_codec.name << " " << numel;
          ASSERT_EQ(data, own);
          expect_step(ring_codec, before[of(rank)], own);
          if (HasFatalFailure()) return;
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
          data[of(rank)] = weights(rank, step, numel);
          const Range stripe = collectives::owned_stripe(numel, size, rank, codec);
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
          const Floats own = weights(rank, step, numel);
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
        const Range stripe = collectives::owned_stripe(numel, size, rank, codec);
        for (size_t i = 0; i < stripe.numel; ++i) sent[stripe.begin + i] += residual(owner[of(rank)], i);
      }
      ASSERT_EQ(sent, meant) << dtype_name(dtype) << " " << numel;
    }
  }
}

const std::vector<std::vector<int>> kUnequalNodes = {{0}, {1, 2, 3}, {4, 5}, {6, 7}};

size_t node_of(int rank) {
  for (size_t node = 0; node < kUnequalNodes.size(); ++node) {
    for (int member : kUnequalNodes[node]) {
      if (member == rank) return node;
    }
  }
  return kUnequalNodes.size();
}

// The share that rank p takes of rank q's values where the nodes form a ring of w_kl = 1/3 and the smallest has one
// rank: of the mean over another node l what the definition says, w_kl m / n_k, and the rest of the mean over its own.
std::array<std::array<double, 8>, 8> unequal_nodes_matrix() {
  std::array<std::array<double, 8>, 8> matrix{};
  for (int p = 0; p < 8; ++p) {
    const size_t k = node_of(p);
    const double other = 1.0 / 3 * 1 / static_cast<double>(kUnequalNodes[k].size());
    for (int q = 0; q < 8; ++q) {
      const size_t l = node_of(q);
      const bool is_neighbor = l == (k + 1) % 4 || l == (k + 3) % 4;
      const double weight = l == k ? 1 - 2 * other : is_neighbor ? other : 0;
      matrix[of(p)][of(q)] = weight / static_cast<double>(kUnequalNodes[l].size());
    }
  }
  return matrix;
}

TEST(HierarchicalNeighborAverage, IsTheMatrixOfTheDefinition) {
  const auto matrix = unequal_nodes_matrix();
  for (size_t p = 0; p < 8; ++p) {
    double row = 0, column = 0;
    for (size_t q = 0; q < 8; ++q) {
      row += matrix[p][q];
      column += matrix[q][p];
    }
    ASSERT_NEAR(row, 1, 1e-12);     // equal values stay as they are
    ASSERT_NEAR(column, 1, 1e-12);  // and the mean over all ranks
  }
  const std::vector<int> leaders = {0, 1, 4, 6};
  for (size_t numel : {size_t{0}, size_t{1}, size_t{3000}, size_t{100000}}) {
    std::vector<Floats> data(8);
    run_world(8, [&](Context& context, int rank) {
      data[of(rank)] = weights(rank, 0, numel);
      const auto node = static_cast<int>(node_of(rank));
      std::vector<Neighbor> ring;
      for (int other = 0; other < 4; ++other) {
        if (other == (node + 2) % 4) continue;
        ring.push_back({other, 1.0 / 3, other != node, other != node});
      }
      perform(operation(OperationKind::kNeighborAverage, DType::kF32, numel), [&] {
        return collectives::hierarchical_neighbor_average(context, Hierarchy{kUnequalNodes[of(node)], leaders}, 1,
                                                          data[of(rank)].data(), numel, DType::kF32, ring, nullptr);
      });
    });
    std::vector<Floats> before(8);
    for (int rank = 0; rank < 8; ++rank) before[of(rank)] = weights(rank, 0, numel);
    for (size_t p = 0; p < 8; ++p) {
      for (size_t i = 0; i < numel; ++i) {
        double expected = 0;
        for (size_t q = 0; q < 8; ++q) expected += matrix[p][q] * static_cast<double>(before[q][i]);
        ASSERT_NEAR(data[p][i], expected, 2e-6) << "rank " << p << " of " << numel << " at " << i;
      }
      ASSERT_EQ(data[p], data[of(kUnequalNodes[node_of(static_cast<int>(p))][0])]);
    }
  }
}

}  // namespace
}  // namespace bagua::testing

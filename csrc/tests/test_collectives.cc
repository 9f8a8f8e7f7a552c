// The reducing collectives against double oracles: every algorithm, group size, type, operator and length.
#include <gtest/gtest.h>

#include "csrc/collectives/algorithms.h"
#include "csrc/tests/test_collectives_values.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using collectives::all_reduce;

struct AllReduce {
  const char* name;
  void (*run)(Context&, void*, size_t, DType, ReduceOp);
  bool for_halves;
};

void selected(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  all_reduce(context, data, numel, dtype, op, nullptr);
}

const AllReduce kAllReduces[] = {
    {"selected", selected, true},
    {"recursive_doubling", collectives::recursive_doubling_all_reduce, true},
    {"ring", collectives::ring_all_reduce, false},
    {"two_shot", collectives::two_shot_all_reduce, true},
    {"direct", collectives::direct_all_reduce, true},
    {"staged", collectives::staged_all_reduce, true},
};

bool is_half(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// Elements first, first + stride, ... of the reduction of elements offset... of the fixture.
class Expected {
 public:
  Expected(const ReductionCase& c, size_t size, size_t offset, size_t first, size_t stride)
      : case_(c), size_(size), first_(first), stride_(stride) {
    for (size_t i = first; i < c.numel; i += stride) elements_.push_back(expected(c.dtype, c.op, size, offset + i));
  }

  void check(const std::string& algorithm, const Bytes& got) const {
    size_t i = first_;
    for (const double want : elements_) {
      const double have = load(case_.dtype, got, i);
      if (std::fabs(have - want) > tolerance(case_.dtype, case_.op) * std::fabs(want)) {
        require(false, algorithm + ": " + name_of(case_) + " over " + std::to_string(size_) + " ranks: element " +
                           std::to_string(i) + " is " + std::to_string(have) + ", expected " + std::to_string(want));
      }
      i += stride_;
    }
  }

 private:
  const ReductionCase case_;
  const size_t size_, first_, stride_;
  std::vector<double> elements_;
};

class Reductions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Reductions, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Reductions, AllReduceEqualsTheOracleOnEveryRank) {
  const auto size = static_cast<size_t>(GetParam());
  std::vector<std::vector<std::string>> hashes(size);
  run_world(GetParam(), [&](Context& context, int rank) {
    const auto r = static_cast<size_t>(rank);
    for (const ReductionCase& c : all_cases()) {
      const Bytes before = values(c.dtype, c.op, size, r, c.numel);
      const Expected share(c, size, 0, r, size);  // each rank checks its own; equal hashes make it every rank's
      for (const AllReduce& algorithm : kAllReduces) {
        if (size == 1 && algorithm.run != selected) continue;  // algorithms.h asks for two or more ranks
        if (is_half(c.dtype) && !algorithm.for_halves) continue;
        Bytes data = before;
        perform(operation(OperationKind::kAllReduce, c.dtype, c.numel, c.op),
                [&] { algorithm.run(context, data.data(), c.numel, c.dtype, c.op); });
        share.check(algorithm.name, data);
        hashes[r].push_back(std::string(algorithm.name) + ": " + name_of(c) + ": " + std::to_string(hash_of(data)));
      }
    }
  });
  for (size_t r = 1; r < size; ++r) EXPECT_EQ(hashes[0], hashes[r]) << "rank " << r;
}

// Values whose sums round, zeros of both signs, infinities, and NaNs of different payloads.
Bytes awkward_values(DType dtype, size_t rank, size_t numel) {
  Bytes array(numel * item_bytes(dtype));
  uint64_t state = 0x9e3779b97f4a7c15ull * (rank + 1);
  for (uint8_t& byte : array) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<uint8_t>(state >> 56);
  }
  for (size_t i = 0; i < numel; i += 7) store(dtype, array, i, 0.0);
  for (size_t i = rank; i < numel; i += 7) array[(i + 1) * item_bytes(dtype) - 1] |= 0x80;
  return array;
}

TEST_P(Reductions, AllReduceEndsBitEqualWhateverTheValues) {
  const auto size = static_cast<size_t>(GetParam());
  for (const AllReduce& algorithm : kAllReduces) {
    if (size == 1 && algorithm.run != selected) continue;
    SCOPED_TRACE(algorithm.name);
    std::vector<std::vector<Bytes>> results(size);
    run_world(GetParam(), [&](Context& context, int rank) {
      for (const DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
          for (const size_t numel : {size_t{1}, size_t{1025}, size_t{20011}}) {
            Bytes data = awkward_values(dtype, static_cast<size_t>(rank), numel);
            perform(operation(OperationKind::kAllReduce, dtype, numel, op),
                    [&] { algorithm.run(context, data.data(), numel, dtype, op); });
            results[static_cast<size_t>(rank)].push_back(std::move(data));
          }
        }
      }
    });
    for (size_t r = 1; r < size; ++r) EXPECT_TRUE(results[0] == results[r]) << "rank " << r;
  }
}

struct ReduceScatter {
  const char* name;
  void (*run)(Context&, const void*, void*, size_t, DType, ReduceOp);
  bool for_halves;
};

void direct(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op) {
  require(collectives::direct_reduce_scatter(context, input, output, numel, dtype, op), "local memory is shared");
}

const ReduceScatter kReduceScatters[] = {
    {"selected", collectives::reduce_scatter, true},
    {"stripes", collectives::stripes_reduce_scatter, true},
    {"ring", collectives::ring_reduce_scatter, false},
    {"direct", direct, true},
};

TEST_P(Reductions, ReduceScatterEqualsTheOracle) {
  const auto size = static_cast<size_t>(GetParam());
  run_world(GetParam(), [&](Context& context, int rank) {
    const auto r = static_cast<size_t>(rank);
    for (ReductionCase c : all_cases()) {
      if (c.numel > 2000) c.numel = c.numel / size + 1;  // the input is `size` times as large
      const Bytes input = values(c.dtype, c.op, size, r, size * c.numel);
      const Bytes before = input;
      const Expected block(c, size, r * c.numel, 0, c.numel > 2000 ? 3 : 1);
      for (const ReduceScatter& algorithm : kReduceScatters) {
        if (size == 1 && algorithm.run != collectives::reduce_scatter) continue;
        if (is_half(c.dtype) && !algorithm.for_halves) continue;
        Bytes output(c.numel * item_bytes(c.dtype));
        perform(operation(OperationKind::kReduceScatter, c.dtype, c.numel, c.op),
                [&] { algorithm.run(context, input.data(), output.data(), c.numel, c.dtype, c.op); });
        block.check(algorithm.name, output);
        require(input == before, "the input has changed");
      }
    }
  });
}

void direct_to(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root) {
  require(collectives::direct_reduce(context, data, numel, dtype, op, root), "local memory is shared");
}

TEST_P(Reductions, ReduceEqualsTheOracleAtTheRootAndLeavesTheOthersAlone) {
  const auto size = static_cast<size_t>(GetParam());
  run_world(GetParam(), [&](Context& context, int rank) {
    const auto r = static_cast<size_t>(rank);
    int root = 0;
    for (const ReductionCase& c : all_cases()) {
      root = (root + 1) % static_cast<int>(size);
      const Bytes before = values(c.dtype, c.op, size, r, c.numel);
      const Expected result(rank == root ? c : ReductionCase{c.dtype, c.op, 0}, size, 0, 0, c.numel > 2000 ? 3 : 1);
      for (const auto run : {collectives::reduce, collectives::tree_reduce, collectives::stripes_reduce, direct_to}) {
        if (size == 1 && run != collectives::reduce) continue;
        Bytes data = before;
        perform(operation(OperationKind::kReduce, c.dtype, c.numel, c.op, root),
                [&] { run(context, data.data(), c.numel, c.dtype, c.op, root); });
        result.check("reduce", data);
        require(rank == root || data == before, "data of a rank other than the root has changed");
      }
    }
  });
}

TEST(Reductions, WhatIsNotDefinedIsRefusedByName) {
  run_world(2, [](Context& context, int) {
    int64_t data[4] = {};
    const auto refuses = [&](auto call, const std::string& what) {
      try {
        call();
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::kInvalidArgument, "wrong kind");
        require(std::string(error.what()).find(what) != std::string::npos, error.what());
        return;
      }
      require(false, "not refused: " + what);
    };
    using namespace collectives;
    refuses([&] { all_reduce(context, data, 4, DType::kI64, ReduceOp::kAvg, nullptr); },
            "all_reduce: AVG is not defined for int64");
    refuses([&] { reduce(context, data, 4, DType::kBool, ReduceOp::kSum, 0); }, "reduce: SUM is not defined for bool");
    refuses([&] { reduce_scatter(context, data, data, 1, DType::kF32, ReduceOp::kBand); },
            "reduce_scatter: BAND is not defined for float32");
  });
}

TEST(Reductions, NothingIsAllocatedInTheWorkspaceAfterTheFirstTime) {
  run_world(3, [](Context& context, int) {
    for (const AllReduce& algorithm : kAllReduces) {
      size_t after_first = 0;
      for (int i = 0; i < 3; ++i) {
        std::vector<float> data(300000, 1.0f);
        perform(operation(OperationKind::kAllReduce, DType::kF32, data.size()),
                [&] { algorithm.run(context, data.data(), data.size(), DType::kF32, ReduceOp::kSum); });
        if (i == 0) after_first = context.workspace.total_bytes();
        require(context.workspace.total_bytes() == after_first, algorithm.name);
      }
    }
  });
}

}  // namespace
}  // namespace bagua::testing

// The compressed all_reduce, for every registered codec: bit-equal to the definition computed stripe by
// stripe without rounds or messages, on every rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/kernels/cast.h"
#include "csrc/tests/test_collectives_values.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using collectives::all_reduce;
using collectives::partition;
using collectives::Range;

const DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Bell-shaped values, different for every rank, converted to the type.
Bytes random_values(DType dtype, size_t rank, size_t numel) {
  uint64_t state = 0x9e3779b97f4a7c15ull * (rank + 1);
  std::vector<float> wide(numel);
  for (float& x : wide) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    // The sum of the four upper 12-bit digits, centred.
    const uint64_t sum = (state >> 52) + (state >> 40 & 4095) + (state >> 28 & 4095) + (state >> 16 & 4095);
    x = (static_cast<float>(sum) - 8190.0f) / 1000.0f;
  }
  Bytes array(numel * item_bytes(dtype));
  if (dtype == DType::kF32) std::copy_n(reinterpret_cast<const uint8_t*>(wide.data()), array.size(), array.data());
  if (dtype != DType::kF32) kernels::cast(DType::kF32, wide.data(), dtype, array.data(), numel, Stream{});
  return array;
}

struct Definition {
  Bytes result;
  std::vector<size_t> counts;  // by rank: non-finite blocks of its input and of its reduced stripe
};

// Q(op_j Q(x_j)) with whole stripes.
Definition define(const Codec& codec, DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, size_t numel) {
  const size_t size = inputs.size(), item = item_bytes(dtype);
  Definition definition{Bytes(numel * item), std::vector<size_t>(size)};
  for (size_t owner = 0; owner < size; ++owner) {
    const Range stripe = partition(numel, size, owner, codec.block_numel());
    if (stripe.numel == 0) continue;
    std::vector<float> sums(stripe.numel, 0.0f);
    Bytes codes(codec.wire_bytes(stripe.numel, dtype));
    for (size_t r = 0; r < size; ++r) {
      definition.counts[r] += codec.encode(inputs[r].data() + stripe.begin * item, dtype, stripe.numel, codes.data(),
                                           {derive_key(0, 0), stripe.begin}, Stream{});
      codec.decode_add(codes.data(), dtype, stripe.numel, sums.data(), Stream{});
    }
    if (op == ReduceOp::kAvg) {
      for (float& s : sums) s = static_cast<float>(static_cast<double>(s) * (1.0 / static_cast<double>(size)));
    }
    codes.resize(codec.wire_bytes(stripe.numel, DType::kF32));
    definition.counts[owner] +=
        codec.encode(sums.data(), DType::kF32, stripe.numel, codes.data(), {derive_key(0, 1), stripe.begin}, Stream{});
    codec.decode(codes.data(), DType::kF32, stripe.numel, sums.data(), Stream{});
    uint8_t* out = definition.result.data() + stripe.begin * item;
    if (dtype == DType::kF32) std::memcpy(out, sums.data(), stripe.numel * item);
    if (dtype != DType::kF32) kernels::cast(DType::kF32, sums.data(), dtype, out, stripe.numel, Stream{});
  }
  return definition;
}

class Compressed : public ::testing::TestWithParam<int> {
 protected:
  size_t size() const { return static_cast<size_t>(GetParam()); }

  void expect_definition(const Codec& codec, DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, size_t numel) {
    const Definition want = define(codec, dtype, op, inputs, numel);
    run_world(GetParam(), [&](Context& context, int rank) {
      const auto r = static_cast<size_t>(rank);
      Bytes data = inputs[r];
      const size_t count = perform(operation(OperationKind::kAllReduce, dtype, numel, op),
                                   [&] { return all_reduce(context, data.data(), numel, dtype, op, &codec); });
      const std::string what = std::string(codec.name()) + " " + name_of({dtype, op, numel});
      require(data == want.result, what + ": rank " + std::to_string(rank) + " differs from the definition");
      require(count == want.counts[r],
              what + ": " + std::to_string(count) + " non-finite blocks, expected " + std::to_string(want.counts[r]));
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, Compressed, ::testing::Values(2, 3, 4, 5, 8));

TEST_P(Compressed, EqualsItsDefinitionBitForBit) {
  ASSERT_FALSE(registered_codecs().empty());
  for (const std::string& name : registered_codecs()) {
    for (const DType dtype : kDTypes) {
      for (const size_t numel : {0, 1, 33, 2048, 2049, 65537, 300000}) {
        std::vector<Bytes> inputs;
        for (size_t r = 0; r < size(); ++r) inputs.push_back(random_values(dtype, r, numel));
        const ReduceOp op = numel % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
        expect_definition(get_codec(name), dtype, op, inputs, numel);
      }
    }
  }
}

TEST_P(Compressed, ManyRoundsOfAnUnevenTensor) {
  const size_t numel = 3 * (size_t{1} << 20) + 12345;
  std::vector<Bytes> inputs;
  for (size_t r = 0; r < size(); ++r) inputs.push_back(random_values(DType::kF32, r, numel));
  expect_definition(get_codec(registered_codecs().front()), DType::kF32, ReduceOp::kAvg, inputs, numel);
}

TEST_P(Compressed, ANaNOfOneRankReachesAllAndIsCounted) {
  const size_t numel = 100000;
  for (const std::string& name : registered_codecs()) {
    const Codec& codec = get_codec(name);
    run_world(GetParam(), [&](Context& context, int rank) {
      std::vector<float> data(numel, 1.0f + static_cast<float>(rank));
      const size_t at = numel / 2;
      if (rank == 1) data[at] = std::nanf("");
      const size_t count = perform(operation(OperationKind::kAllReduce, DType::kF32, numel), [&] {
        return all_reduce(context, data.data(), numel, DType::kF32, ReduceOp::kSum, &codec);
      });
      require(std::isnan(data[at]), name + ": the NaN is lost on rank " + std::to_string(rank));
      require(std::isfinite(data[0]) && std::isfinite(data[numel - 1]), name + ": the NaN has left its block");
      const Range mine = partition(numel, size(), static_cast<size_t>(rank), codec.block_numel());
      const bool owns = at >= mine.begin && at < mine.begin + mine.numel;
      require(count == (rank == 1 ? 1u : 0u) + (owns ? 1u : 0u), name + ": counted " + std::to_string(count));
    });
  }
}

TEST_P(Compressed, ErrorOfMinmaxStaysWithinTwoQuantisations) {
  const size_t numel = 50000;
  std::vector<Bytes> inputs;
  double widest = 0;  // range of any block, at most twice the largest magnitude
  std::vector<double> sums(numel);
  for (size_t r = 0; r < size(); ++r) {
    inputs.push_back(random_values(DType::kF32, r, numel));
    for (size_t i = 0; i < numel; ++i) {
      sums[i] += load(DType::kF32, inputs[r], i);
      widest = std::max(widest, 2 * std::fabs(load(DType::kF32, inputs[r], i)));
    }
  }
  const double first = static_cast<double>(size()) * widest / 510;
  const double bound = (first + (static_cast<double>(size()) * widest + 2 * first) / 510) * 1.001;
  run_world(GetParam(), [&](Context& context, int rank) {
    Bytes data = inputs[static_cast<size_t>(rank)];
    perform(operation(OperationKind::kAllReduce, DType::kF32, numel), [&] {
      return all_reduce(context, data.data(), numel, DType::kF32, ReduceOp::kSum, &get_codec("minmax_uint8"));
    });
    for (size_t i = 0; i < numel; ++i) {
      require(std::fabs(load(DType::kF32, data, i) - sums[i]) <= bound, "element " + std::to_string(i));
    }
  });
}

TEST_P(Compressed, WorkspaceIsAtMostTheSizeOfTheCodes) {
  const Codec& codec = get_codec("minmax_uint8");
  for (const size_t numel : {size_t{1} << 20, size_t{1} << 23}) {
    run_world(GetParam(), [&](Context& context, int) {
      std::vector<float> data(numel, 1.0f);
      perform(operation(OperationKind::kAllReduce, DType::kF32, numel),
              [&] { return all_reduce(context, data.data(), numel, DType::kF32, ReduceOp::kSum, &codec); });
      const size_t codes = codec.wire_bytes(numel, DType::kF32), used = context.workspace.total_bytes();
      require(used <= codes + codes / 8,
              std::to_string(used) + " bytes of workspace for " + std::to_string(codes) + " of codes");
      bool seen[6] = {};
      for (const Event& event : context.events.take(true)) seen[static_cast<size_t>(event.kind)] = true;
      require(seen[static_cast<size_t>(EventKind::kEncode)] && seen[static_cast<size_t>(EventKind::kWire)] &&
                  seen[static_cast<size_t>(EventKind::kDecode)],
              "encode, wire and decode spans are recorded");
    });
  }
}

TEST(Compressed, OneRankKeepsItsValuesAndOtherTypesAreRefused) {
  const Codec& codec = get_codec("minmax_uint8");
  run_world(1, [&](Context& context, int) {
    std::vector<float> data = {1.25f, std::nanf(""), -3.0f};
    require(all_reduce(context, data.data(), 3, DType::kF32, ReduceOp::kAvg, &codec) == 0, "nothing is encoded");
    require(data[0] == 1.25f && std::isnan(data[1]) && data[2] == -3.0f, "the values have changed");
    for (const auto& [dtype, op] :
         {std::pair{DType::kF64, ReduceOp::kSum}, {DType::kI32, ReduceOp::kSum}, {DType::kF32, ReduceOp::kMax}}) {
      try {
        all_reduce(context, data.data(), 1, dtype, op, &codec);
        require(false, "not refused");
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::kInvalidArgument, error.what());
      }
    }
  });
}

}  // namespace
}  // namespace bagua::testing

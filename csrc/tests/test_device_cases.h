// Every collective as a case that runs on ranks of the CPU and of a device alike, to compare what they end with.
#pragma once

#include <functional>
#include <numeric>

#include "csrc/codecs/codec.h"
#include "csrc/collectives/algorithms.h"
#include "csrc/device/memory.h"
#include "csrc/tests/test_device_world.h"

namespace bagua::testing {

using namespace collectives;

// One collective, in terms of one rank's input and output memory.
struct Case {
  std::string name;
  OperationKind kind;
  DType dtype = DType::kF32;
  size_t input_numel = 0;
  size_t output_numel = 0;  // 0: the input is changed in place
  std::function<uint64_t(Context&, void* input, void* output)> run;

  bool is_in_place() const { return output_numel == 0; }
};

// Finite values of any magnitude that a gradient has.
inline Bytes values_of(DType dtype, size_t numel, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  Bytes bytes(numel * item_bytes(dtype));
  for (size_t i = 0; i < numel; ++i) {
    const float value = normal(rng);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &bits, 4);
    } else {  // bf16, truncated
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

struct Outcome {
  Bytes input, output;
  bool operator==(const Outcome&) const = default;
};

inline Operation operation_of(const Case& one) {
  Operation operation = stamp(0, one.input_numel, one.kind);
  operation.dtype = one.dtype;
  return operation;
}

// Draws the same numbers on both.
inline uint64_t run_case(const Case& one, Context& context, void* input, void* output) {
  context.rng_key = 1000 + static_cast<uint64_t>(context.group.rank());
  return one.run(context, input, output);
}

inline std::vector<Outcome> on_cpu(std::vector<std::unique_ptr<Engine>>& engines, const Case& one) {
  std::vector<Outcome> outcomes(engines.size());
  std::vector<std::shared_ptr<Work>> works;
  for (size_t r = 0; r < outcomes.size(); ++r) {
    Outcome& mine = outcomes[r];
    mine.input = values_of(one.dtype, one.input_numel, static_cast<uint32_t>(r));
    mine.output.assign(one.output_numel * item_bytes(one.dtype), 0xaa);
    works.push_back(engines[r]->submit(operation_of(one), mine.input.size(), 30s, [&one, &mine](Context& context) {
      return run_case(one, context, mine.input.data(), mine.output.data());
    }));
  }
  for (const auto& work : works) {
    EXPECT_TRUE(work->wait_for(30s));
    if (const auto error = work->error()) throw Error(*error);
  }
  return outcomes;
}

inline std::vector<Outcome> on_device(std::vector<std::unique_ptr<Engine>>& engines, const Case& one,
                                      Device (*device_of)(int rank) = device_of_rank) {
  std::vector<Outcome> outcomes(engines.size());
  std::vector<std::function<void()>> ranks;
  for (size_t r = 0; r < engines.size(); ++r) {
    ranks.push_back([&, r] {
      DeviceUser user(device_of(static_cast<int>(r)));
      const Bytes values = values_of(one.dtype, one.input_numel, static_cast<uint32_t>(r));
      const size_t output_bytes = one.output_numel * item_bytes(one.dtype);
      void* const input = user.upload(values);
      void* const output = one.is_in_place() ? nullptr : user.upload(Bytes(output_bytes, 0xaa));
      const auto work = engines[r]->submit(
          operation_of(one), values.size(), 30s,
          [&one, input, output](Context& context) { return run_case(one, context, input, output); }, user.ready());
      if (const auto error = user.wait(work)) throw Error(*error);
      outcomes[r] = {user.download(input, values.size()), user.download(output, output_bytes)};
      EXPECT_TRUE(work->wait_for(30s)) << "an operation did not end";
    });
  }
  run_together(ranks);
  return outcomes;
}

inline void expect_equal(const std::vector<Outcome>& device, const std::vector<Outcome>& cpu, const std::string& what) {
  for (size_t r = 0; r < cpu.size(); ++r) {
    EXPECT_TRUE(device[r].input == cpu[r].input) << what << ": rank " << r << " ends with another input";
    EXPECT_TRUE(device[r].output == cpu[r].output) << what << ": rank " << r << " ends with another output";
  }
}

inline std::vector<Case> full_precision_cases(size_t size, size_t numel, DType dtype) {
  const size_t bytes = numel * item_bytes(dtype);
  const auto in_place = [&](std::string name, OperationKind kind, auto run) {
    return Case{std::move(name), kind, dtype, numel, 0, [=](Context& context, void* data, void*) -> uint64_t {
                  run(context, data);
                  return 0;
                }};
  };
  const auto moved = [&](std::string name, OperationKind kind, size_t input, size_t output, auto run) {
    return Case{std::move(name), kind, dtype, input, output, [=](Context& context, void* from, void* to) -> uint64_t {
                  run(context, from, to);
                  return 0;
                }};
  };
  const int last = static_cast<int>(size) - 1;
  std::vector<size_t> splits(size, numel * item_bytes(dtype));
  return {
      in_place("all_reduce", OperationKind::kAllReduce,
               [=](Context& c, void* data) { all_reduce(c, data, numel, dtype, ReduceOp::kAvg, nullptr); }),
      in_place("two_shot", OperationKind::kAllReduce,
               [=](Context& c, void* data) { two_shot_all_reduce(c, data, numel, dtype, ReduceOp::kSum); }),
      in_place("ring", OperationKind::kAllReduce,
               [=](Context& c, void* data) { ring_all_reduce(c, data, numel, dtype, ReduceOp::kMax); }),
      in_place("recursive_doubling", OperationKind::kAllReduce,
               [=](Context& c, void* data) { recursive_doubling_all_reduce(c, data, numel, dtype, ReduceOp::kAvg); }),
      in_place("hierarchical", OperationKind::kAllReduce,
               [=](Context& c, void* data) {
                 const int mine = c.group.rank() < 2 ? 0 : 2;
                 Hierarchy nodes;
                 for (int r = mine; r < std::min(mine + 2, c.group.size()); ++r) nodes.node.push_back(r);
                 for (int r = 0; r < c.group.size(); r += 2) nodes.leaders.push_back(r);
                 hierarchical_all_reduce(c, nodes, data, numel, dtype, ReduceOp::kAvg, nullptr);
               }),
      in_place("reduce", OperationKind::kReduce,
               [=](Context& c, void* data) { reduce(c, data, numel, dtype, ReduceOp::kSum, last); }),
      in_place("tree_reduce", OperationKind::kReduce,
               [=](Context& c, void* data) { tree_reduce(c, data, numel, dtype, ReduceOp::kAvg, 0); }),
      in_place("broadcast", OperationKind::kBroadcast,
               [=](Context& c, void* data) { broadcast(c, data, bytes, last); }),
      in_place("tree_broadcast", OperationKind::kBroadcast,
               [=](Context& c, void* data) { tree_broadcast(c, data, bytes, 0); }),
      in_place("barrier", OperationKind::kBarrier, [](Context& c, void*) { barrier(c); }),
      in_place("neighbor_average", OperationKind::kNeighborAverage,
               [=](Context& c, void* data) {
                 const int n = c.group.size(), rank = c.group.rank();
                 std::vector<Neighbor> ring;
                 for (int r = 0; r < n; ++r) {
                   const bool is_beside = r == (rank + 1) % n || r == (rank + n - 1) % n;
                   if (r == rank) ring.push_back({r, 0.5, false, false});
                   if (r != rank && is_beside) ring.push_back({r, n == 2 ? 0.25 : 0.125, true, true});
                 }
                 neighbor_average(c, data, numel, dtype, ring, nullptr);
               }),
      moved("reduce_scatter", OperationKind::kReduceScatter, size * numel, numel,
            [=](Context& c, void* from, void* to) { reduce_scatter(c, from, to, numel, dtype, ReduceOp::kAvg); }),
      moved("ring_reduce_scatter", OperationKind::kReduceScatter, size * numel, numel,
            [=](Context& c, void* from, void* to) { ring_reduce_scatter(c, from, to, numel, dtype, ReduceOp::kSum); }),
      moved("all_gather", OperationKind::kAllGather, numel, size * numel,
            [=](Context& c, void* from, void* to) { all_gather(c, from, to, bytes); }),
      moved("ring_all_gather", OperationKind::kAllGather, numel, size * numel,
            [=](Context& c, void* from, void* to) { ring_all_gather(c, from, to, bytes); }),
      moved("all_to_all", OperationKind::kAllToAll, size * numel, size * numel,
            [=](Context& c, void* from, void* to) { all_to_all(c, from, splits, to, splits); }),
      moved("gather", OperationKind::kGather, numel, size * numel,
            [=](Context& c, void* from, void* to) { gather(c, from, to, bytes, last); }),
      moved("scatter", OperationKind::kScatter, size * numel, numel,
            [=](Context& c, void* from, void* to) { scatter(c, from, to, bytes, last); }),
  };
}

inline std::vector<Case> compressed_cases(size_t size, size_t numel, DType dtype, const std::string& spec) {
  const Codec* const codec = &get_codec(spec);
  const auto one = [&](std::string name, OperationKind kind, size_t input, size_t output, auto run) {
    return Case{spec + " " + std::move(name), kind, dtype, input, output, run};
  };
  const std::vector<size_t> splits(size, numel);
  return {
      one("all_reduce", OperationKind::kAllReduce, numel, 0,
          [=](Context& c, void* data, void*) { return all_reduce(c, data, numel, dtype, ReduceOp::kAvg, codec); }),
      one("broadcast", OperationKind::kBroadcast, numel, 0,
          [=](Context& c, void* data, void*) { return compressed_broadcast(c, data, numel, dtype, 1, *codec); }),
      one("reduce_scatter", OperationKind::kReduceScatter, size * numel, numel,
          [=](Context& c, void* from, void* to) {
            return compressed_reduce_scatter(c, from, to, numel, dtype, ReduceOp::kSum, *codec);
          }),
      one("all_gather", OperationKind::kAllGather, numel, size * numel,
          [=](Context& c, void* from, void* to) { return compressed_all_gather(c, from, to, numel, dtype, *codec); }),
      one("all_to_all", OperationKind::kAllToAll, size * numel, size * numel,
          [=](Context& c, void* from, void* to) {
            return compressed_all_to_all(c, from, splits, to, splits, dtype, *codec);
          }),
      one("neighbor_average", OperationKind::kNeighborAverage, numel, 0,
          [=](Context& c, void* data, void*) {
            std::vector<Neighbor> everybody;
            for (int r = 0; r < c.group.size(); ++r) {
              const bool is_own = r == c.group.rank();
              everybody.push_back({r, 1.0 / c.group.size(), !is_own, !is_own});
            }
            return neighbor_average(c, data, numel, dtype, everybody, codec);
          }),
  };
}

// With error feedback, whose residuals lie beside the data, and gradients that lie apart from the bucket.
inline Case feedback_case(const std::string& spec, DType residual) {
  constexpr size_t kNumel = 9'000, kFirst = 4'100, kGap = 64;
  const Codec* const codec = &get_codec(spec);
  const size_t item = item_bytes(residual), stripe_bytes = kNumel * item;
  // Input: two gradients with a gap between them. Output: the bucket, then worker_out and owner_out.
  const size_t output_bytes = kNumel * sizeof(float) + kNumel * item + stripe_bytes;
  const auto run = [=](Context& c, void* from, void* to) -> uint64_t {
    auto* const bytes = static_cast<uint8_t*>(to);
    uint8_t* const worker = bytes + kNumel * sizeof(float);
    uint8_t* const owner = worker + kNumel * item;
    device::fill_zero(worker, kNumel * item + stripe_bytes, c.stream);
    const InputSegments segments(
        {{0, kFirst, from}, {kFirst + kGap, kNumel - kFirst - kGap, static_cast<float*>(from) + kFirst}});
    uint64_t blocks = 0;
    for (int step = 0; step < 3; ++step) {
      blocks += all_reduce(c, to, kNumel, DType::kF32, ReduceOp::kAvg, codec, {worker, worker, owner, owner, residual},
                           segments);
    }
    return blocks;
  };
  return {spec, OperationKind::kAllReduce, DType::kF32, kNumel, output_bytes / sizeof(float), run};
}

// A reduce_scatter with error feedback: of the worker alone, over all blocks of its input.
inline Case scattered_feedback_case(size_t size, const std::string& spec, DType residual) {
  constexpr size_t kNumel = 5'000;
  const Codec* const codec = &get_codec(spec);
  const size_t residual_bytes = size * kNumel * item_bytes(residual);
  // Output: the block, then worker_out.
  const auto run = [=](Context& c, void* from, void* to) -> uint64_t {
    uint8_t* const worker = static_cast<uint8_t*>(to) + kNumel * sizeof(float);
    device::fill_zero(worker, residual_bytes, c.stream);
    uint64_t blocks = 0;
    for (int step = 0; step < 3; ++step) {
      blocks += compressed_reduce_scatter(c, from, to, kNumel, DType::kF32, ReduceOp::kAvg, *codec,
                                          {worker, worker, nullptr, nullptr, residual});
    }
    return blocks;
  };
  const size_t output_numel = kNumel + residual_bytes / sizeof(float);
  return {spec + " reduce_scatter", OperationKind::kReduceScatter, DType::kF32, size * kNumel, output_numel, run};
}

inline std::vector<std::unique_ptr<Engine>> make_cpu_engines(int size, const Kind& kind = kTcp) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(size, kind))
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  return engines;
}

}  // namespace bagua::testing

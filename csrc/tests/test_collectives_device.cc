// Every collective on the emulated device, staged over every transport, against the CPU's bits under the same choice of
// algorithm: the CPU's ranks are connected by TCP, so that shared memory, which a device has not, decides nothing.
#include <numeric>

#include "csrc/codecs/codec.h"
#include "csrc/collectives/algorithms.h"
#include "csrc/device/memory.h"
#include "csrc/tests/test_device_world.h"

namespace bagua::testing {
namespace {

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
Bytes values_of(DType dtype, size_t numel, uint32_t seed) {
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

Operation operation_of(const Case& one) {
  Operation operation = stamp(0, one.input_numel, one.kind);
  operation.dtype = one.dtype;
  return operation;
}

// Draws the same numbers on both.
uint64_t run_case(const Case& one, Context& context, void* input, void* output) {
  context.rng_key = 1000 + static_cast<uint64_t>(context.group.rank());
  return one.run(context, input, output);
}

std::vector<Outcome> on_cpu(std::vector<std::unique_ptr<Engine>>& engines, const Case& one) {
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

std::vector<Outcome> on_device(std::vector<std::unique_ptr<Engine>>& engines, const Case& one) {
  std::vector<Outcome> outcomes(engines.size());
  std::vector<std::function<void()>> ranks;
  for (size_t r = 0; r < engines.size(); ++r) {
    ranks.push_back([&, r] {
      DeviceUser user(device_of_rank(static_cast<int>(r)));
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

void expect_equal(const std::vector<Outcome>& device, const std::vector<Outcome>& cpu, const std::string& what) {
  for (size_t r = 0; r < cpu.size(); ++r) {
    EXPECT_TRUE(device[r].input == cpu[r].input) << what << ": rank " << r << " ends with another input";
    EXPECT_TRUE(device[r].output == cpu[r].output) << what << ": rank " << r << " ends with another output";
  }
}

std::vector<Case> full_precision_cases(size_t size, size_t numel, DType dtype) {
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

std::vector<Case> compressed_cases(size_t size, size_t numel, DType dtype, const std::string& spec) {
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

std::vector<std::unique_ptr<Engine>> make_cpu_engines(int size) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(size, kTcp))
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  return engines;
}

class OnDevice : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Transports, OnDevice, ::testing::Values(kShm, kTcp, kLocal), kind_name);

TEST_P(OnDevice, CollectivesGiveTheBitsOfTheCpu) {
  for (const int size : {2, 3}) {
    auto engines = make_device_engines(size, GetParam());
    auto reference = make_cpu_engines(size);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const size_t numel : {size_t{0}, size_t{5}, size_t{70'001}}) {
        for (const Case& one : full_precision_cases(static_cast<size_t>(size), numel, dtype)) {
          const auto what = one.name + " of " + std::to_string(numel) + " " + std::string(dtype_name(dtype)) +
                            " among " + std::to_string(size);
          expect_equal(on_device(engines, one), on_cpu(reference, one), what);
        }
      }
    }
  }
}

TEST_P(OnDevice, CompressedCollectivesGiveTheBitsOfTheCpu) {
  const int size = 3;
  auto engines = make_device_engines(size, GetParam());
  auto reference = make_cpu_engines(size);
  for (const std::string& spec : registered_codecs()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const size_t numel : {size_t{0}, size_t{5'000}}) {
        for (const Case& one : compressed_cases(size, numel, dtype, spec)) {
          const auto what = one.name + " of " + std::to_string(numel) + " " + std::string(dtype_name(dtype));
          expect_equal(on_device(engines, one), on_cpu(reference, one), what);
        }
      }
    }
  }
}

// With error feedback, whose residuals lie on the device too, and gradients that lie apart from the bucket.
TEST_P(OnDevice, FeedbackAndSegmentsGiveTheBitsOfTheCpu) {
  constexpr int kSize = 3;
  constexpr size_t kNumel = 9'000, kFirst = 4'100, kGap = 64;
  auto engines = make_device_engines(kSize, GetParam());
  auto reference = make_cpu_engines(kSize);
  for (const std::string& spec : registered_codecs()) {
    const Codec* const codec = &get_codec(spec);
    for (const DType residual : {DType::kF32, DType::kBF16}) {
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
          blocks += all_reduce(c, to, kNumel, DType::kF32, ReduceOp::kAvg, codec,
                               {worker, worker, owner, owner, residual}, segments);
        }
        return blocks;
      };
      const Case one{spec, OperationKind::kAllReduce, DType::kF32, kNumel, output_bytes / sizeof(float), run};
      expect_equal(on_device(engines, one), on_cpu(reference, one), spec + " " + std::string(dtype_name(residual)));
    }
  }
}

// What crosses between host and device under a codec is codes, and nothing is computed anywhere but there.
TEST(StagedTraffic, OnlyCodesCrossToTheHost) {
  constexpr int kSize = 2;
  constexpr size_t kNumel = 64 << 10;
  auto engines = make_device_engines(kSize, kTcp);
  const Codec& codec = get_codec("minmax_uint8");
  std::vector<std::unique_ptr<DeviceUser>> users;
  std::vector<void*> data;
  for (int r = 0; r < kSize; ++r) {
    users.push_back(std::make_unique<DeviceUser>(device_of_rank(r)));
    data.push_back(users.back()->upload(values_of(DType::kF32, kNumel, static_cast<uint32_t>(r))));
    emulated().synchronize(users.back()->stream());
  }
  emulated().reset_counters();
  std::vector<std::shared_ptr<Work>> works;
  for (size_t r = 0; r < kSize; ++r) {
    works.push_back(engines[r]->submit(
        stamp(0, kNumel), kNumel * 4, 30s,
        [&codec, at = data[r]](Context& context) {
          return all_reduce(context, at, kNumel, DType::kF32, ReduceOp::kAvg, &codec);
        },
        users[r]->ready()));
  }
  for (const auto& work : works) {
    ASSERT_TRUE(work->wait_for(30s));
    ASSERT_FALSE(work->error());
  }
  const auto counters = emulated().counters();
  // Each rank sends the codes of the other's half, and those of the half that it has reduced.
  const size_t codes = kSize * 2 * codec.wire_bytes(kNumel / 2, DType::kF32);
  EXPECT_EQ(counters.bytes_to_host, codes);
  EXPECT_EQ(counters.bytes_to_device, codes);
  EXPECT_EQ(works[0]->bytes_sent(), codes / kSize);
  const std::map<std::string, uint64_t> launches = {
      {"minmax_uint8_encode", kSize * 2}, {"minmax_uint8_reduce_encode", kSize}, {"minmax_uint8_decode", kSize * 2}};
  EXPECT_EQ(counters.launches, launches);
}

TEST_P(OnDevice, MessagesOfDeviceAndHostKeepTheirOrder) {
  auto engines = make_device_engines(2, GetParam());
  constexpr size_t kLarge = 3 * PinnedChannel::kPieceBytes + 1000, kSmall = 40;
  Operation message = stamp(0, 1, OperationKind::kPointToPoint);
  const auto bytes_of = [](int tag, size_t count) { return Bytes(count, static_cast<uint8_t>(tag)); };
  run_together({[&] {
                  DeviceUser user(device_of_rank(0));
                  std::vector<Bytes> host;
                  std::vector<std::shared_ptr<Work>> works;
                  for (int tag = 0; tag < 12; ++tag) {
                    message.variant = static_cast<uint32_t>(tag);
                    const Bytes values = bytes_of(tag, tag % 3 == 0 ? kLarge : kSmall);
                    if (tag % 2 == 0) {
                      void* const there = user.upload(values);
                      works.push_back(engines[0]->submit_send(1, there, values.size(), message, 30s, user.ready()));
                    } else {
                      host.push_back(values);
                      works.push_back(engines[0]->submit_send(1, host.back().data(), values.size(), message, 30s));
                    }
                  }
                  for (const auto& work : works) {
                    ASSERT_TRUE(work->wait_for(30s));
                    ASSERT_FALSE(work->error());
                  }
                },
                [&] {
                  DeviceUser user(device_of_rank(1));
                  Operation expected = message;
                  for (int tag = 0; tag < 12; ++tag) {
                    expected.variant = static_cast<uint32_t>(tag);
                    const Bytes values = bytes_of(tag, tag % 3 == 0 ? kLarge : kSmall);
                    if (tag % 2 == 0) {
                      void* const there = user.upload(Bytes(values.size(), 0xee));
                      const auto work = engines[1]->submit_recv(0, there, values.size(), expected, 30s, user.ready());
                      ASSERT_FALSE(user.wait(work));
                      EXPECT_TRUE(user.download(there, values.size()) == values) << "message " << tag;
                    } else {
                      Bytes here(values.size());
                      const auto work = engines[1]->submit_recv(0, here.data(), here.size(), expected, 30s);
                      ASSERT_TRUE(work->wait_for(30s));
                      ASSERT_FALSE(work->error());
                      EXPECT_TRUE(here == values) << "message " << tag;
                    }
                  }
                }});
}

// ---- what goes wrong

Engine::Run average(void* data, size_t numel) {
  return [=](Context& context) { return all_reduce(context, data, numel, DType::kF32, ReduceOp::kAvg, nullptr); };
}

TEST_P(OnDevice, ADeviceTensorAndAHostTensorInOneOperationAreRefusedOnBothRanks) {
  auto engines = make_device_engines(2, GetParam());
  DeviceUser user(device_of_rank(0));
  void* const there = user.upload(Bytes(400, 1));
  Bytes here(400, 1);
  const auto device = engines[0]->submit(stamp(0, 100), 400, 10s, average(there, 100), user.ready());
  const auto host = engines[1]->submit(stamp(0, 100), 400, 10s, average(here.data(), 100));
  for (const auto& work : {device, host}) {
    ASSERT_TRUE(work->wait_for(10s));
    ASSERT_TRUE(work->error());
    EXPECT_CONTAINS(std::string(work->error()->what()), "on emulated");
  }
}

TEST_P(OnDevice, AMissingPeerIsNamedAtTheDeadline) {
  auto engines = make_device_engines(2, GetParam());
  DeviceUser user(device_of_rank(0));
  void* const there = user.upload(Bytes(2 * PinnedChannel::kPieceBytes, 1));
  const auto begin = Clock::now();
  const auto work =
      engines[0]->submit(stamp(0, 1000), 4000, 300ms, average(there, 2 * PinnedChannel::kPieceBytes / 4), user.ready());
  const auto error = user.wait(work);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded) << error->what();
  EXPECT_LT(Clock::now() - begin, 300ms + 2s);
}

TEST(DeviceFailures, MemoryThatEndsInAWorkspaceIsAnErrorOfAllRanks) {
  auto engines = make_device_engines(2, kShm);
  std::vector<std::unique_ptr<DeviceUser>> users;
  std::vector<std::shared_ptr<Work>> works;
  constexpr size_t kNumel = 100'000;
  std::vector<void*> data;
  for (int r = 0; r < 2; ++r) {
    users.push_back(std::make_unique<DeviceUser>(Device{DeviceKind::kEmulated, r}));
    data.push_back(users.back()->upload(values_of(DType::kF32, kNumel, 1)));
  }
  emulated().limit_memory(kNumel * 4 + 1000);
  for (size_t r = 0; r < 2; ++r) {
    works.push_back(engines[r]->submit(stamp(0, kNumel), 4 * kNumel, 10s, average(data[r], kNumel), users[r]->ready()));
  }
  for (const auto& work : works) {
    ASSERT_TRUE(work->wait_for(10s));
    ASSERT_TRUE(work->error());
    EXPECT_TRUE(work->error()->kind() == ErrorKind::kDevice || work->error()->kind() == ErrorKind::kRemote);
    EXPECT_CONTAINS(std::string(work->error()->what()), "memory");
  }
  emulated().limit_memory(device::EmulatedRuntime::kMemoryBytes);
}

TEST(DeviceFailures, AKernelThatFailsIsAnErrorOfItsRankAndThenOfAll) {
  auto engines = make_device_engines(2, kTcp);
  std::vector<std::unique_ptr<DeviceUser>> users;
  std::vector<std::shared_ptr<Work>> works;
  constexpr size_t kNumel = 100'000;
  for (int r = 0; r < 2; ++r) users.push_back(std::make_unique<DeviceUser>(Device{DeviceKind::kEmulated, r}));
  std::vector<void*> data;
  for (auto& user : users) data.push_back(user->upload(values_of(DType::kF32, kNumel, 1)));
  for (auto& user : users) emulated().synchronize(user->stream());
  emulated().fail_next_kernel(1);
  for (size_t r = 0; r < 2; ++r) {
    works.push_back(engines[r]->submit(stamp(0, kNumel), 4 * kNumel, 3s, average(data[r], kNumel), users[r]->ready()));
  }
  for (const auto& work : works) ASSERT_TRUE(work->wait_for(10s));
  ASSERT_TRUE(works[1]->error());
  EXPECT_EQ(works[1]->error()->kind(), ErrorKind::kDevice) << works[1]->error()->what();
  const auto next = engines[0]->submit(stamp(0, kNumel), 4 * kNumel, 3s, average(data[0], kNumel), users[0]->ready());
  ASSERT_TRUE(next->wait_for(10s));
  ASSERT_TRUE(next->error());
  EXPECT_EQ(next->error()->kind(), ErrorKind::kRemote) << next->error()->what();
  EXPECT_EQ(next->error()->rank(), 1);
  engines.clear();
  emulated().reset_errors();
}

}  // namespace
}  // namespace bagua::testing

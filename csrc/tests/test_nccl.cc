// Collectives of device memory over NCCL: a fake libnccl on emulated devices, which moves the bytes, records the calls
// and notes what NCCL would not forgive. Algorithms of ours give the CPU's bits; what NCCL does by itself is compared
// with its definition in plain loops.
#include "csrc/tests/test_device_cases.h"
#include "csrc/tests/test_nccl_world.h"

namespace bagua::testing {
namespace {

using namespace collectives;
using Engines = std::vector<std::unique_ptr<Engine>>;
using Texts = std::vector<std::string>;

constexpr DeviceChoice kAuto = DeviceChoice::kAuto, kNative = DeviceChoice::kNative, kStaged = DeviceChoice::kStaged;

class OverNccl : public ::testing::Test {
 protected:
  void SetUp() override { FakeNccl::instance().reset(); }
  void TearDown() override {
    EXPECT_EQ(FakeNccl::instance().violations(), "");
    EXPECT_EQ(FakeNccl::instance().num_communicators(), 0) << "a communicator outlives its group";
    FakeNccl::instance().reset();
  }
  FakeNccl& fake() { return FakeNccl::instance(); }
};

// ---- the library

std::string why_unusable(const std::string& path) {
  const auto error = error_of([&] { nccl::NcclLibrary::open(path); });
  EXPECT_EQ(error->kind(), ErrorKind::kInvalidArgument);
  return error->what();
}

TEST_F(OverNccl, ALibraryThatCannotBeUsedSaysWhyAndWhatIsNeeded) {
  EXPECT_CONTAINS(why_unusable("/nowhere/libnccl.so.2"), "NCCL cannot be loaded: /nowhere/libnccl.so.2");
  EXPECT_CONTAINS(why_unusable("libm.so.6"), "libm.so.6 is not NCCL: it has no ncclGetVersion");
  EXPECT_CONTAINS(why_unusable(BAGUA_LACKING_NCCL), "NCCL 2.27.3, lacks the function nccl");
  fake().set_version(nccl::version_code(2, 13, 4));
  const std::string old = why_unusable(BAGUA_FAKE_NCCL);
  EXPECT_CONTAINS(old, "fake_nccl.so is NCCL 2.13.4, which is too old");
  EXPECT_CONTAINS(old, "2.14.0 or later");
}

TEST_F(OverNccl, VersionsAreReadAsNcclNumbersThem) {
  EXPECT_EQ(nccl::version_name(2708), "2.7.8");
  EXPECT_EQ(nccl::version_name(21400), "2.14.0");
  EXPECT_EQ(nccl::NcclLibrary::open(BAGUA_FAKE_NCCL)->version(), 22703);
}

// ---- values

float value_at(DType dtype, const Bytes& bytes, size_t i) {
  uint32_t bits = 0;
  if (dtype == DType::kF32) {
    std::memcpy(&bits, bytes.data() + 4 * i, 4);
  } else {
    uint16_t half;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void set_value(DType dtype, Bytes& bytes, size_t i, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (dtype == DType::kF32) {
    std::memcpy(bytes.data() + 4 * i, &bits, 4);
  } else {  // to the nearest, of two the even one
    const auto half = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
}

// The sum in the order of the ranks, in f32, rounded once.
std::vector<Outcome> expected_sums(const Case& one, size_t size, bool averages) {
  std::vector<Outcome> outcomes(size);
  for (size_t r = 0; r < size; ++r) {
    outcomes[r].input = values_of(one.dtype, one.input_numel, static_cast<uint32_t>(r));
    outcomes[r].output.assign(one.output_numel * item_bytes(one.dtype), 0xaa);
  }
  Bytes sums(outcomes[0].input.size());
  for (size_t i = 0; i < one.input_numel; ++i) {
    float sum = value_at(one.dtype, outcomes[0].input, i);
    for (size_t r = 1; r < size; ++r) sum += value_at(one.dtype, outcomes[r].input, i);
    set_value(one.dtype, sums, i, averages ? sum / static_cast<float>(size) : sum);
  }
  for (size_t r = 0; r < size; ++r) {
    if (one.kind == OperationKind::kAllReduce || (one.kind == OperationKind::kReduce && r == size - 1)) {
      outcomes[r].input = sums;
    } else if (one.kind == OperationKind::kReduceScatter) {
      const size_t block = outcomes[r].output.size();
      outcomes[r].output.assign(sums.data() + r * block, sums.data() + (r + 1) * block);
    }
  }
  return outcomes;
}

TEST_F(OverNccl, CollectivesOfOursGiveTheBitsOfTheCpuAndItsOwnThoseOfTheirDefinition) {
  for (const int size : {2, 3}) {
    auto engines = make_nccl_engines(size, {.kind = size == 2 ? kShm : kTcp});
    auto reference = make_cpu_engines(size);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const size_t numel : {size_t{0}, size_t{5}, size_t{70'001}}) {
        if (dtype == DType::kBF16 && size == 2) continue;
        for (const Case& one : full_precision_cases(static_cast<size_t>(size), numel, dtype)) {
          const auto what = one.name + " of " + std::to_string(numel) + " " + std::string(dtype_name(dtype)) +
                            " among " + std::to_string(size);
          // One node of all ranks is no hierarchy.
          const bool averages =
              one.name == "all_reduce" || one.name == "reduce_scatter" || (one.name == "hierarchical" && size == 2);
          const bool sums = averages || one.name == "reduce";
          const auto expected = sums ? expected_sums(one, static_cast<size_t>(size), averages) : on_cpu(reference, one);
          expect_equal(on_device(engines, one, own_device), expected, what);
        }
      }
    }
  }
}

TEST_F(OverNccl, CompressedCollectivesGiveTheBitsOfTheCpu) {
  const int size = 3;
  auto engines = make_nccl_engines(size);
  auto reference = make_cpu_engines(size);
  for (const std::string& spec : registered_codecs()) {
    for (const size_t numel : {size_t{0}, size_t{5'000}}) {
      const DType dtype = numel % 2 == 0 ? DType::kF32 : DType::kBF16;
      for (const Case& one : compressed_cases(size, numel, dtype, spec)) {
        expect_equal(on_device(engines, one, own_device), on_cpu(reference, one), one.name);
      }
    }
    const Case one = feedback_case(spec, DType::kF32);
    expect_equal(on_device(engines, one, own_device), on_cpu(reference, one), spec + " with feedback");
  }
}

TEST_F(OverNccl, EveryTypeAndOperatorThatItHasIsReducedByItAndTheOthersByUs) {
  auto engines = make_nccl_engines(2);
  const auto count = [&] { return fake().num_calls("all_reduce 64"); };
  for (int type = 0; type < kNumDTypes; ++type) {
    for (int number = 0; number < kNumReduceOps; ++number) {
      const auto dtype = static_cast<DType>(type);
      const auto op = static_cast<ReduceOp>(number);
      if (!is_defined(op, dtype)) continue;
      const size_t before = count(), bytes = 64 * item_bytes(dtype);
      std::vector<Bytes> results(2);
      std::vector<std::function<void()>> ranks;
      for (size_t r = 0; r < 2; ++r) {
        ranks.push_back([&, r] {
          DeviceUser user(own_device(static_cast<int>(r)));
          // 1 where all types have a 1, so that the result is known: 2 for a sum, 1 for the rest but exclusive or.
          Bytes ones(bytes, 0);
          for (size_t i = 0; i < 64; ++i) {
            const size_t item = item_bytes(dtype);
            const double one = 1;
            const float single = 1;
            if (dtype == DType::kF64) {
              std::memcpy(ones.data() + i * item, &one, item);
            } else if (dtype == DType::kF32) {
              std::memcpy(ones.data() + i * item, &single, item);
            } else if (is_floating(dtype)) {
              const uint16_t half = dtype == DType::kF16 ? 0x3c00 : 0x3f80;
              std::memcpy(ones.data() + i * item, &half, item);
            } else {
              ones[i * item] = 1;
            }
          }
          void* const data = user.upload(ones);
          Operation what = stamp(0, 64);
          what.dtype = dtype;
          what.reduce_op = op;
          const auto work = engines[r]->submit(
              what, bytes, 10s, [=](Context& context) { return all_reduce(context, data, 64, dtype, op, nullptr); },
              user.ready());
          ASSERT_FALSE(user.wait(work));
          results[r] = user.download(data, bytes);
          if (op != ReduceOp::kSum && op != ReduceOp::kBxor) {
            EXPECT_TRUE(results[r] == ones) << dtype_name(dtype);
          } else if (!is_floating(dtype)) {
            EXPECT_EQ(results[r][0], op == ReduceOp::kSum ? 2 : 0) << dtype_name(dtype);
          }
        });
      }
      run_together(ranks);
      EXPECT_EQ(results[0], results[1]);
      const bool keeps_nan = is_floating(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax);
      const bool is_its = dtype != DType::kBool && number <= static_cast<int>(ReduceOp::kMax) && !keeps_nan;
      EXPECT_EQ(count() - before, is_its ? 2u : 0u) << reduce_op_name(op) << " of " << dtype_name(dtype);
    }
  }
}

// NCCL's own would give the number.
TEST_F(OverNccl, MinAndMaxOfANanAreNan) {
  auto engines = make_nccl_engines(2);
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    std::vector<std::function<void()>> ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.push_back([&, r] {
        DeviceUser user(own_device(r));
        const float value = r == 0 ? 1.0f : std::numeric_limits<float>::quiet_NaN();
        Bytes bytes(sizeof value);
        std::memcpy(bytes.data(), &value, sizeof value);
        void* const data = user.upload(bytes);
        Operation what = stamp(0, 1);
        what.reduce_op = op;
        const auto work = engines[static_cast<size_t>(r)]->submit(
            what, 4, 10s, [=](Context& context) { return all_reduce(context, data, 1, DType::kF32, op, nullptr); },
            user.ready());
        ASSERT_FALSE(user.wait(work));
        EXPECT_TRUE(std::isnan(value_at(DType::kF32, user.download(data, 4), 0))) << reduce_op_name(op);
      });
    }
    run_together(ranks);
  }
}

// ---- calls

Engine::Run average(void* data, size_t numel) {
  return [=](Context& context) { return all_reduce(context, data, numel, DType::kF32, ReduceOp::kAvg, nullptr); };
}

// One rank's tensor on its device, and the operations on it.
struct Trainer {
  Trainer(Engine& engine_, Device device, size_t numel_)
      : engine(engine_), user(device), numel(numel_), data(user.upload(values_of(DType::kF32, numel, 1))) {}

  // Until no stream of the device uses what the trainer frees.
  ~Trainer() { emulated().synchronize(user.stream().device); }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  std::shared_ptr<Work> submit(Engine::Run run, std::chrono::nanoseconds timeout = 10s,
                               OperationKind kind = OperationKind::kAllReduce) {
    Operation operation = stamp(0, numel, kind);
    operation.dtype = DType::kF32;
    return engine.submit(operation, numel * 4, timeout, std::move(run), user.ready());
  }
  std::shared_ptr<Work> all_reduce(std::chrono::nanoseconds timeout = 10s) {
    return submit(average(data, numel), timeout);
  }

  Engine& engine;
  DeviceUser user;
  size_t numel;
  void* data;
};

std::vector<std::unique_ptr<Trainer>> make_trainers(Engines& engines, size_t numel = 1000,
                                                    Device (*device_of)(int) = own_device) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (auto& engine : engines) {
    const int rank = engine->communicator().rank();
    trainers.push_back(std::make_unique<Trainer>(*engine, device_of(rank), numel));
  }
  return trainers;
}

using Works = std::vector<std::shared_ptr<Work>>;

template <typename Submit>
Works submit_all(std::vector<std::unique_ptr<Trainer>>& trainers, Submit submit) {
  Works works;
  for (auto& trainer : trainers) works.push_back(submit(*trainer));
  return works;
}

Works all_reduce_all(std::vector<std::unique_ptr<Trainer>>& trainers, std::chrono::nanoseconds timeout = 10s) {
  return submit_all(trainers, [&](Trainer& trainer) { return trainer.all_reduce(timeout); });
}

void expect_success(const Works& works) {
  for (const auto& work : works) {
    ASSERT_TRUE(work->wait_for(30s)) << "an operation did not end";
    EXPECT_FALSE(work->error()) << work->error()->what();
  }
}

Error failure_of(const std::shared_ptr<Work>& work) {
  EXPECT_TRUE(work->wait_for(30s)) << "an operation did not end";
  EXPECT_TRUE(work->error()) << "an operation did not fail";
  return work->error().value_or(Error(ErrorKind::kInternal, "no error"));
}

TEST_F(OverNccl, CommunicatorsAreMadeAtTheFirstCollectiveOnADeviceAndDestroyedWithTheGroup) {
  {
    auto engines = make_nccl_engines(2);
    std::vector<float> here(100, 1);
    std::vector<float> there(100, 2);
    expect_success({engines[0]->submit(stamp(0, 100), 400, 10s, average(here.data(), 100)),
                    engines[1]->submit(stamp(0, 100), 400, 10s, average(there.data(), 100))});
    auto trainers = make_trainers(engines);
    const Operation message = stamp(0, 1000, OperationKind::kPointToPoint);
    expect_success({engines[0]->submit_send(1, trainers[0]->data, 4000, message, 10s, trainers[0]->user.ready()),
                    engines[1]->submit_recv(0, trainers[1]->data, 4000, message, 10s, trainers[1]->user.ready())});
    EXPECT_EQ(fake().calls(), Texts{});
    EXPECT_EQ(engines[0]->communicator().device_path(), "");
    expect_success(all_reduce_all(trainers));
    expect_success(all_reduce_all(trainers));
    EXPECT_EQ(engines[0]->communicator().device_path(), "NCCL 2.27.3");
    EXPECT_EQ(fake().calls(0), (Texts{"unique_id", "init", "all_reduce 1000", "all_reduce 1000"}));
    EXPECT_EQ(fake().calls(1), (Texts{"init", "all_reduce 1000", "all_reduce 1000"}));
    EXPECT_EQ(fake().num_communicators(), 2);
  }
  EXPECT_EQ(fake().calls(1), (Texts{"init", "all_reduce 1000", "all_reduce 1000", "finalize", "destroy"}));
}

TEST_F(OverNccl, WhatIsNativeIsOneCallAndNothingCrossesToTheHost) {
  auto engines = make_nccl_engines(3);
  auto trainers = make_trainers(engines, 3000);
  expect_success(all_reduce_all(trainers));
  for (auto& trainer : trainers) emulated().synchronize(trainer->user.stream());
  emulated().reset_counters();
  const Works works = all_reduce_all(trainers);
  expect_success(works);
  const auto counters = emulated().counters();
  EXPECT_EQ(counters.bytes_to_host, 0u);
  EXPECT_EQ(counters.bytes_to_device, 0u);
  EXPECT_EQ(counters.launches, (std::map<std::string, uint64_t>{{"nccl_all_reduce", 3}}));
  EXPECT_EQ(works[0]->bytes_sent(), 2u * 2 * 12000 / 3);
}

TEST_F(OverNccl, MessagesThatAreUnderWayTogetherAreOneGroup) {
  auto engines = make_nccl_engines(3);
  auto trainers = make_trainers(engines, 9000);
  const std::vector<size_t> splits(3, 4000);
  std::vector<void*> outputs;
  for (auto& trainer : trainers) outputs.push_back(trainer->user.allocate(12000));
  const auto exchange = [&](Trainer& trainer) {
    void* const output = outputs[static_cast<size_t>(trainer.engine.communicator().rank())];
    return trainer.submit(
        [&, output](Context& context) -> uint64_t {
          all_to_all(context, trainer.data, splits, output, splits);
          return 0;
        },
        10s, OperationKind::kAllToAll);
  };
  expect_success(submit_all(trainers, exchange));
  EXPECT_EQ(fake().calls(1).back(), "group{recv 0 4000, send 2 4000, recv 2 4000, send 0 4000}");
  // A codec: contributions to all owners, then results, one group each.
  const size_t before = fake().calls(2).size();
  const Codec& codec = get_codec("minmax_uint8");
  expect_success(submit_all(trainers, [&](Trainer& trainer) {
    return trainer.submit(
        [&](Context& context) { return all_reduce(context, trainer.data, 9000, DType::kF32, ReduceOp::kAvg, &codec); });
  }));
  const auto calls = fake().calls(2);
  ASSERT_EQ(calls.size(), before + 2);
  for (size_t i = before; i < calls.size(); ++i) {
    EXPECT_EQ(std::count(calls[i].begin(), calls[i].end(), ','), 3) << calls[i];
  }
}

TEST_F(OverNccl, NotesOfManyRanksTravelInLogarithmicallyManySteps) {
  auto engines = make_nccl_engines(9, {.kind = kLocal});
  auto trainers = make_trainers(engines, 40);
  for (int step = 0; step < 2; ++step) expect_success(all_reduce_all(trainers));
  const Bytes expected = trainers[0]->user.download(trainers[0]->data, 160);
  for (auto& trainer : trainers) EXPECT_EQ(trainer->user.download(trainer->data, 160), expected);
  EXPECT_EQ(fake().num_calls("all_reduce 40"), 18u);
}

// Groups enqueue by themselves, and NCCL asks for one order of what they enqueue on a device.
TEST_F(OverNccl, OperationsOfSeveralGroupsAreEnqueuedInOneOrderOnAllRanks) {
  constexpr size_t kNumOperations = 40;
  auto first = make_nccl_engines(2, {.key = "first"});
  auto second = make_nccl_engines(2, {.key = "second"});
  std::vector<std::unique_ptr<Trainer>> trainers;
  Works works;
  for (auto* engines : {&first, &second}) {
    for (auto& trainer : make_trainers(*engines)) trainers.push_back(std::move(trainer));
    expect_success({trainers[trainers.size() - 2]->all_reduce(), trainers.back()->all_reduce()});
  }
  const size_t num_before = fake().calls(0).size();
  for (size_t i = 0; i < kNumOperations; ++i) {  // the ranks start them in different orders
    for (const size_t trainer : {size_t{0}, size_t{2}, size_t{3}, size_t{1}}) {
      works.push_back(trainers[trainer]->submit(average(trainers[trainer]->data, 2 * i + trainer / 2 + 1)));
    }
  }
  expect_success(works);
  Texts orders[2] = {fake().calls(0), fake().calls(1)};
  for (Texts& order : orders) order.erase(order.begin(), order.end() - 2 * kNumOperations);
  EXPECT_EQ(num_before + 2 * kNumOperations, fake().calls(0).size());
  EXPECT_EQ(orders[0], orders[1]);
}

TEST(DeviceTurns, AProposalThatMayComeToBeBeforeHoldsUpWhatIsAfter) {
  emulated();
  DeviceTurns& turns = DeviceTurns::of(own_device(8));
  const DeviceTurns::Member first(turns);
  EXPECT_FALSE(first.has_others());
  const DeviceTurns::Member second(turns);
  EXPECT_TRUE(first.has_others());
  std::optional<DeviceTurns::Turn> early(std::in_place, turns, "b", "group b");
  DeviceTurns::Turn late(turns, "a", "group a");
  EXPECT_LT(early->number(), late.number());
  late.agree(late.number() + 10);
  EXPECT_FALSE(late.has_come());
  EXPECT_TRUE(early->has_come());
  early->agree(late.number());  // of two that agree on one number the key tells
  EXPECT_TRUE(late.has_come());
  EXPECT_FALSE(early->has_come());
  late.agree(late.number() + 1);
  EXPECT_FALSE(late.has_come());
  early.reset();
  EXPECT_TRUE(late.has_come());
  EXPECT_GT(DeviceTurns::Turn(turns, "c", "group c").number(), late.number());
}

TEST(DeviceTurns, WhatIsEnqueuedStandsBehindTheTurnBefore) {
  DeviceUser one(own_device(8)), other(own_device(8));
  DeviceTurns& turns = DeviceTurns::of(own_device(8));
  const DeviceTurns::Member member(turns);
  std::atomic<bool> has_run{false}, was_behind{false};
  {
    DeviceTurns::Turn turn(turns, "one", "group one");
    EXPECT_EQ(turn.begin(one.stream()).end, nullptr);
    emulated().run(one.stream(), "slow", [&] {
      std::this_thread::sleep_for(20ms);
      has_run = true;
    });
    turn.end(one.stream());
  }
  DeviceTurns::Turn turn(turns, "other", "group other");
  const DeviceTurns::Enqueued before = turn.begin(other.stream());
  EXPECT_EQ(before.group, "group one");
  emulated().run(other.stream(), "look", [&] { was_behind = has_run.load(); });
  turn.end(other.stream());
  emulated().synchronize(other.stream());
  EXPECT_TRUE(was_behind);
  EXPECT_TRUE(before.end->is_done());
}

// ---- who takes it

TEST_F(OverNccl, AutoIsStagedWhereRanksShareADevice) {
  auto engines = make_nccl_engines(3, {.asked = {kAuto}});
  auto trainers = make_trainers(engines, 1000, device_of_rank);
  expect_success(all_reduce_all(trainers));
  EXPECT_EQ(fake().calls(), Texts{});
  for (auto& engine : engines) {
    EXPECT_EQ(engine->communicator().device_path(),
              "staged: ranks 0 and 2 share the device emulated:0, and NCCL needs one for each");
  }
}

// MIG instances have ids of their own, but NCCL goes by the GPU's place on the bus, and refuses.
TEST_F(OverNccl, AutoIsStagedWhereRanksHavePartsOfADevice) {
  emulated().be_parts(true);
  auto engines = make_nccl_engines(2, {.asked = {kAuto}});
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  emulated().be_parts(false);
  EXPECT_EQ(fake().calls(), Texts{});
  EXPECT_EQ(engines[1]->communicator().device_path(),
            "staged: ranks 0 and 1 have parts of the device emulated, and NCCL needs one for each");
}

TEST_F(OverNccl, AutoTakesItWhereEveryRankHasADeviceOfItsOwn) {
  auto engines = make_nccl_engines(2, {.asked = {kAuto}});
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  EXPECT_EQ(fake().num_calls("all_reduce 1000"), 2u);
}

TEST_F(OverNccl, AutoIsStagedWhereARankHasNoLibraryAndAskedForItIsAnErrorOfAllThatNamesTheRank) {
  const Texts libraries = {BAGUA_FAKE_NCCL, "/nowhere/libnccl.so.2", BAGUA_FAKE_NCCL};
  {
    auto engines = make_nccl_engines(3, {.libraries = libraries, .asked = {kAuto}});
    auto trainers = make_trainers(engines);
    expect_success(all_reduce_all(trainers));
    EXPECT_CONTAINS(engines[2]->communicator().device_path(), "staged: rank 1 has no usable NCCL: ");
  }
  auto engines = make_nccl_engines(3, {.libraries = libraries, .asked = {kAuto, kAuto, kNative}});
  auto trainers = make_trainers(engines);
  for (const auto& work : all_reduce_all(trainers)) {
    const Error error = failure_of(work);
    EXPECT_CONTAINS(std::string(error.what()), "rank 2 asks for NCCL, but rank 1 has no usable NCCL: ");
    EXPECT_CONTAINS(std::string(error.what()), "/nowhere/libnccl.so.2");
  }
  EXPECT_EQ(fake().num_calls("init"), 0u);
}

TEST_F(OverNccl, AskedForItWithASharedDeviceIsAnErrorOfAll) {
  auto engines = make_nccl_engines(3);
  auto trainers = make_trainers(engines, 1000, device_of_rank);
  for (const auto& work : all_reduce_all(trainers)) {
    EXPECT_CONTAINS(std::string(failure_of(work).what()), "ranks 0 and 2 share the device emulated:0");
  }
}

TEST_F(OverNccl, AskedForStagingOpensNoLibrary) {
  auto engines = make_nccl_engines(2, {.libraries = {"/nowhere"}, .asked = {kStaged, kAuto}});
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  EXPECT_EQ(engines[1]->communicator().device_path(), "staged: rank 0 asks for it");
}

DeviceNote note(DeviceChoice asked, uint32_t version, const std::string& id) {
  DeviceNote made;
  made.asked = asked;
  made.version = version;
  std::memcpy(made.device_id, id.data(), id.size());
  return made;
}

TEST(DeviceDecision, NeedsEqualVersionsAndEqualWishes) {
  const nccl::NcclSource source;
  EXPECT_TRUE(decide_device_path({note(kAuto, 22703, "a"), note(kNative, 22703, "b")}, source).is_native);
  const auto differ = decide_device_path({note(kAuto, 22703, "a"), note(kAuto, 22105, "b")}, source);
  EXPECT_FALSE(differ.is_native);
  EXPECT_EQ(differ.why, "rank 0 has NCCL 2.27.3, rank 1 has 2.21.5");
  const auto error = error_of([&] {
    decide_device_path({note(kAuto, 1, "a"), note(kStaged, 0, "b"), note(kNative, 1, "c")}, source);
  });
  EXPECT_CONTAINS(std::string(error->what()), "rank 2 asks for NCCL and rank 1 for staging");
  EXPECT_EQ(error_of([] { device_choice_from("mpi"); })->kind(), ErrorKind::kInvalidArgument);
  // A text that a peer sends need not end.
  DeviceNote endless = note(kAuto, 0, "");
  std::memset(endless.why_not, 'x', sizeof endless.why_not);
  EXPECT_CONTAINS(decide_device_path({endless, endless}, source).why, "rank 0 has no usable NCCL: xxx");
}

TEST(DeviceDecision, RanksShareADeviceWhereNcclIsToldSo) {
  const nccl::NcclSource source;
  const auto of = [](uint64_t host, bool may_share) {
    DeviceNote made = note(kNative, 23000, "one");
    made.host = host;
    made.may_share = may_share;
    return made;
  };
  EXPECT_THROW(decide_device_path({of(0, false), of(0, false)}, source), Error);
  EXPECT_THROW(decide_device_path({of(0, true), of(0, false)}, source), Error);  // NCCL asks each rank by itself
  EXPECT_TRUE(decide_device_path({of(0, true), of(0, true)}, source).is_native);
  EXPECT_TRUE(decide_device_path({of(1, false), of(2, false)}, source).is_native);
  EXPECT_THROW(decide_device_path({of(1, false), of(2, false), of(1, true)}, source), Error);

  // It is for who asks for it.
  std::vector<DeviceNote> notes = {of(0, true), of(0, true)};
  for (DeviceNote& one : notes) one.asked = kAuto;
  const DeviceDecision decision = decide_device_path(notes, source);
  EXPECT_FALSE(decision.is_native);
  EXPECT_CONTAINS(decision.why, "ranks 0 and 1 share the device one, which they take turns on: ask for 'nccl'");
}

TEST(DeviceDecision, PartsOfADeviceAreSharedOnOneHostOnly) {
  const nccl::NcclSource source;
  const auto of = [](DeviceChoice asked, const std::string& id, const std::string& bus_id, uint64_t host,
                     bool may_share) {
    DeviceNote made = note(asked, 23000, id);
    std::memcpy(made.bus_id, bus_id.data(), bus_id.size());
    made.host = host;
    made.may_share = may_share;
    return made;
  };
  const auto decide = [&](DeviceChoice asked, uint64_t other_host, bool may_share) {
    const std::vector<DeviceNote> notes = {of(asked, "MIG 1", "0000:17:00.0", 1, may_share),
                                           of(asked, "MIG 2", "0000:17:00.0", other_host, may_share)};
    return decide_device_path(notes, source);
  };
  EXPECT_CONTAINS(decide(kAuto, 1, false).why,
                  "ranks 0 and 1 have parts of the device 0000:17:00.0, and NCCL needs one for each");
  EXPECT_TRUE(decide(kAuto, 2, false).is_native);  // GPUs of two hosts
  EXPECT_THROW(decide(kNative, 1, false), Error);
  EXPECT_TRUE(decide(kNative, 1, true).is_native);
  EXPECT_CONTAINS(decide(kAuto, 1, true).why, "have parts of the device 0000:17:00.0: ask for 'nccl'");
  EXPECT_TRUE(decide_device_path(
                  {of(kAuto, "one", "0000:17:00.0", 1, false), of(kAuto, "two", "0000:65:00.0", 1, false)}, source)
                  .is_native);
}

TEST(NcclSource, TellsWhereARankIsByItsEnvironment) {
  const nccl::NcclSource source;
  const auto place_with = [&](const char* name, const char* value, uint32_t version) {
    setenv(name, value, 1);
    const auto place = source.place(version);
    unsetenv(name);
    return place;
  };
  EXPECT_EQ(source.place(23000).host, source.place(22703).host);
  EXPECT_FALSE(source.place(23000).may_share);
  EXPECT_TRUE(place_with("NCCL_MULTI_RANK_GPU_ENABLE", "1", 23000).may_share);
  EXPECT_FALSE(place_with("NCCL_MULTI_RANK_GPU_ENABLE", "0", 23000).may_share);
  EXPECT_FALSE(place_with("NCCL_MULTI_RANK_GPU_ENABLE", "1", 22903).may_share);
  const std::string long_name(80, 'n');
  const uint64_t first = place_with("NCCL_HOSTID", (long_name + "0").c_str(), 22703).host;
  EXPECT_NE(first, source.place(22703).host);
  EXPECT_NE(first, place_with("NCCL_HOSTID", (long_name + "1").c_str(), 22703).host);
  EXPECT_EQ(first, place_with("NCCL_HOSTID", (long_name + "0").c_str(), 22703).host);
}

TEST_F(OverNccl, AnotherDeviceThanTheOneThatIsConnectedIsRefused) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  Trainer elsewhere(*engines[1], own_device(2), 1000);
  const auto stays = trainers[0]->all_reduce();
  EXPECT_CONTAINS(std::string(failure_of(elsewhere.all_reduce()).what()),
                  "tensors are on emulated:2, but group 'test' has connected emulated:1");
  EXPECT_EQ(failure_of(stays).kind(), ErrorKind::kRemote);
}

// ---- what goes wrong

TEST_F(OverNccl, RanksInDifferentOperationsAreToldBeforeAnythingIsEnqueued) {
  for (const bool is_first : {true, false}) {
    fake().reset();
    auto engines = make_nccl_engines(2);
    auto trainers = make_trainers(engines);
    if (!is_first) expect_success(all_reduce_all(trainers));
    const auto before = fake().calls();
    const Works works = {trainers[0]->all_reduce(), trainers[1]->submit(
                                                        [&](Context& context) -> uint64_t {
                                                          broadcast(context, trainers[1]->data, 4000, 0);
                                                          return 0;
                                                        },
                                                        10s, OperationKind::kBroadcast)};
    for (const auto& work : works) {
      const std::string text = failure_of(work).what();
      EXPECT_CONTAINS(text, "all_reduce #" + std::to_string(is_first ? 1 : 2) + " of 1000 float32 on emulated");
      EXPECT_CONTAINS(text, "broadcast #");
    }
    const auto after = fake().calls();
    EXPECT_EQ(std::count_if(after.begin(), after.end(), [](auto& call) { return call != "abort"; }),
              static_cast<ptrdiff_t>(before.size()));
  }
}

TEST_F(OverNccl, ACpuTensorAmongDeviceTensorsIsNamedOnBothRanks) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  std::vector<float> here(1000, 1);
  const Works works = {trainers[0]->all_reduce(),
                       engines[1]->submit(stamp(0, 1000), 4000, 10s, average(here.data(), 1000))};
  for (const auto& work : works) EXPECT_CONTAINS(std::string(failure_of(work).what()), "on emulated");
}

TEST_F(OverNccl, AMissingPeerIsNamedAtTheDeadline) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  const auto begin = Clock::now();
  const Error error = failure_of(trainers[0]->all_reduce(300ms));
  EXPECT_EQ(error.kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error.rank(), 1) << error.what();
  EXPECT_LT(Clock::now() - begin, 300ms + 2s);
}

TEST_F(OverNccl, ADeviceThatHangsIsAbortedAtTheDeadlineAndItsStreamGoesOn) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  fake().hang(1);
  const auto begin = Clock::now();
  const Works works = {trainers[0]->all_reduce(400ms), trainers[1]->all_reduce(30s)};
  const Error mine = failure_of(works[0]), theirs = failure_of(works[1]);
  EXPECT_GE(Clock::now() - begin, 400ms);
  EXPECT_LT(Clock::now() - begin, 400ms + 1500ms);
  EXPECT_EQ(mine.kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(mine.rank(), -1);
  EXPECT_CONTAINS(std::string(mine.what()), "emulated:0 of rank 0 has not finished all_reduce #2 of 1000 float32");
  EXPECT_EQ(theirs.kind(), ErrorKind::kRemote);
  EXPECT_CONTAINS(std::string(theirs.what()), "rank 0 reported: emulated:0 of rank 0 has not finished");
  for (size_t r = 0; r < 2; ++r) {
    if (const auto done = works[r]->done_event()) done->let_wait(trainers[r]->user.stream());
    EXPECT_EQ(trainers[r]->user.download(trainers[r]->data, 4000).size(), 4000u);
  }
  EXPECT_LT(Clock::now() - begin, 400ms + 2s);
  EXPECT_EQ(fake().num_calls("abort"), 2u);
  engines.clear();
  EXPECT_EQ(fake().num_calls("destroy"), 0u);
}

TEST_F(OverNccl, WhatIsEnqueuedIsAbortedSoonAfterAnotherRankHasFailed) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  fake().hang(1);
  const Works works = all_reduce_all(trainers, 30s);
  for (const auto& work : works) ASSERT_TRUE(work->wait_enqueued_for(10s));
  const auto begin = Clock::now();
  engines[1]->communicator().liveness().poison(Error(ErrorKind::kInternal, "the disk is full", 1));
  const Error mine = failure_of(works[0]);
  EXPECT_LT(Clock::now() - begin, 300ms + 1s);
  EXPECT_EQ(mine.kind(), ErrorKind::kRemote);
  EXPECT_CONTAINS(std::string(mine.what()), "the disk is full");
  EXPECT_CONTAINS(std::string(failure_of(works[1]).what()), "the disk is full");
  EXPECT_EQ(fake().num_calls("abort"), 2u);
}

TEST_F(OverNccl, WhatAllHadEnqueuedEndsWellThoughTheGroupFails) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  // Both streams are late: the sum is enqueued behind it.
  for (auto& trainer : trainers) {
    emulated().run(trainer->user.stream(), "busy", [] { std::this_thread::sleep_for(100ms); });
  }
  const Works works = all_reduce_all(trainers);
  for (const auto& work : works) ASSERT_TRUE(work->wait_enqueued_for(10s));
  engines[1]->communicator().liveness().poison(Error(ErrorKind::kInternal, "the disk is full", 1));
  expect_success(works);
}

TEST_F(OverNccl, AnAsynchronousErrorIsNamed) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  fake().hang(0);
  fake().hang(1);
  const Works works = all_reduce_all(trainers, 30s);
  for (const auto& work : works) ASSERT_TRUE(work->wait_enqueued_for(10s));
  fake().fail_async(0, nccl::kUnhandledCudaError);
  const Error mine = failure_of(works[0]);
  EXPECT_EQ(mine.kind(), ErrorKind::kDevice);
  EXPECT_CONTAINS(std::string(mine.what()), "NCCL 2.27.3 on emulated:0 reports from what was enqueued: unhandled cuda");
  EXPECT_CONTAINS(std::string(mine.what()), "(told to fail)");
  EXPECT_CONTAINS(std::string(failure_of(works[1]).what()), "rank 0 reported: NCCL 2.27.3 on emulated:0 reports");
}

TEST_F(OverNccl, ACommunicatorThatCannotBeMadeIsAnErrorOfAllRanks) {
  fake().fail_init(1, nccl::kSystemError);
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  const auto begin = Clock::now();
  const Works works = all_reduce_all(trainers, 20s);
  EXPECT_CONTAINS(std::string(failure_of(works[1]).what()), "reports from ncclCommInitRankConfig: unhandled system");
  EXPECT_CONTAINS(std::string(failure_of(works[0]).what()), "rank 1 reported: NCCL");
  EXPECT_LT(Clock::now() - begin, 2s);
  EXPECT_EQ(fake().num_calls("abort"), 2u);
}

TEST_F(OverNccl, ADeviceThatFailsBetweenBatchesLeavesNoPeerBehind) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines, 100'000);
  expect_success(all_reduce_all(trainers));
  // Rank 1 gives up in the middle, with messages enqueued that rank 0 answers and others that it waits for.
  const auto begin = Clock::now();
  const Works works = submit_all(trainers, [&](Trainer& trainer) {
    return trainer.submit(
        [&](Context& context) -> uint64_t {
          two_shot_all_reduce(context, trainer.data, 100'000, DType::kF32, ReduceOp::kSum);
          if (context.group.rank() == 1) throw Error(ErrorKind::kDevice, "no memory", 1);
          two_shot_all_reduce(context, trainer.data, 100'000, DType::kF32, ReduceOp::kSum);
          return 0;
        },
        30s);
  });
  EXPECT_EQ(failure_of(works[1]).kind(), ErrorKind::kDevice);
  EXPECT_CONTAINS(std::string(failure_of(works[0]).what()), "no memory");
  EXPECT_LT(Clock::now() - begin, 2s);
  for (auto& trainer : trainers) emulated().synchronize(trainer->user.stream());
}

// The work that was enqueued before is done; its own waits for a peer that does not come.
TEST_F(OverNccl, AnOperationThatFailsBehindAnotherOneLeavesNothingThatWaits) {
  auto engines = make_nccl_engines(2);
  auto trainers = make_trainers(engines);
  expect_success(all_reduce_all(trainers));
  for (auto& trainer : trainers) {
    emulated().run(trainer->user.stream(), "busy", [] { std::this_thread::sleep_for(50ms); });
  }
  const Works before = all_reduce_all(trainers);
  const auto begin = Clock::now();
  std::atomic<bool> is_enqueued{false}, has_ended{false};
  const Works works = submit_all(trainers, [&](Trainer& trainer) {
    return trainer.submit([&](Context& context) -> uint64_t {
      if (context.group.rank() == 1) {
        context.group.enqueue_native(
            {OperationKind::kAllReduce, trainer.data, trainer.data, trainer.numel, DType::kF32});
        emulated().call(context.stream, "end", [&] { has_ended = true; });
        is_enqueued = true;
      }
      while (!is_enqueued) std::this_thread::yield();  // what rank 0 fails with would reach rank 1 before it began
      throw Error(ErrorKind::kDevice, "no memory", 1);
    });
  });
  expect_success(before);
  EXPECT_CONTAINS(std::string(failure_of(works[1]).what()), "no memory");
  EXPECT_TRUE(has_ended);
  EXPECT_LT(Clock::now() - begin, 2s);
}

}  // namespace
}  // namespace bagua::testing

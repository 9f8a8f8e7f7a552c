// Every collective on the emulated device, staged over every transport, against the CPU's bits under the same choice of
// algorithm: the CPU's ranks are connected by TCP, so that shared memory, which a device has not, decides nothing.
#include "csrc/tests/test_device_cases.h"

namespace bagua::testing {
namespace {

using namespace collectives;

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
  auto engines = make_device_engines(kSize, GetParam());
  auto reference = make_cpu_engines(kSize);
  for (const std::string& spec : registered_codecs()) {
    for (const DType residual : {DType::kF32, DType::kBF16}) {
      for (const Case& one : {feedback_case(spec, residual), scattered_feedback_case(kSize, spec, residual)}) {
        expect_equal(on_device(engines, one), on_cpu(reference, one),
                     one.name + " " + std::string(dtype_name(residual)));
      }
    }
  }
}

// Only codes cross between host and device under a codec, and nothing is computed anywhere but there.
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

// ---- small ones, which the host computes

const std::vector<std::string> kReductions = {"all_reduce", "hierarchical", "reduce", "reduce_scatter"};

bool is_reduction(const Case& one) {
  return std::any_of(kReductions.begin(), kReductions.end(),
                     [&](const std::string& name) { return one.name == name || one.name.ends_with(" " + name); });
}

// The sizes reach as far as the threshold; the CPU's ranks are connected alike, since the host may use shared memory.
TEST_P(OnDevice, SmallReductionsAreTheHostsAndGiveTheBitsOfTheCpu) {
  constexpr size_t kThreshold = 300'000;
  for (const int size : {2, 3}) {
    auto engines = make_device_engines(size, GetParam(), {.on_host_bytes = kThreshold, .device_chunk_scale = 1});
    auto reference = make_cpu_engines(size, GetParam());
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const size_t numel : {size_t{5}, size_t{20'003}}) {
        auto cases = full_precision_cases(static_cast<size_t>(size), numel, dtype);
        for (const std::string& spec : registered_codecs()) {
          const auto compressed = compressed_cases(static_cast<size_t>(size), numel, dtype, spec);
          if (numel > 5) cases.push_back(compressed.front());  // all_reduce
        }
        for (const Case& one : cases) {
          const auto what = one.name + " of " + std::to_string(numel) + " " + std::string(dtype_name(dtype)) +
                            " among " + std::to_string(size);
          emulated().reset_counters();
          const auto found = on_device(engines, one);
          if (is_reduction(one)) {
            EXPECT_TRUE(emulated().counters().launches.empty()) << what;
          }
          expect_equal(found, on_cpu(reference, one), what);
        }
      }
    }
  }
}

// Residuals are the device's, and so is what uses them; of two nodes only the leaders have some, and all ranks agree.
TEST_P(OnDevice, SmallReductionsWithFeedbackAreTheDevices) {
  constexpr size_t kNumel = 40'000;
  const Codec* const codec = &get_codec("minmax_uint8");
  const Case one{"",
                 OperationKind::kAllReduce,
                 DType::kF32,
                 kNumel,
                 2 * kNumel,
                 [=](Context& c, void* data, void* residuals) -> uint64_t {
                   const int rank = c.group.rank(), leader = rank / 2 * 2;
                   auto* const worker = static_cast<float*>(residuals);
                   device::fill_zero(worker, 2 * kNumel * sizeof(float), c.stream);
                   Feedback feedback{.is_asked_for = true};
                   if (rank == leader) feedback = {worker, worker, worker + kNumel, worker + kNumel};
                   return hierarchical_all_reduce(c, {{leader, leader + 1}, {0, 2}}, data, kNumel, DType::kF32,
                                                  ReduceOp::kAvg, codec, feedback);
                 }};
  auto engines = make_device_engines(4, GetParam(), {});
  auto reference = make_cpu_engines(4);
  emulated().reset_counters();
  const auto found = on_device(engines, one);
  EXPECT_GT(emulated().counters().launches["minmax_uint8_encode_with_residual"], 0u);
  expect_equal(found, on_cpu(reference, one), "hierarchical all_reduce with feedback");
}

TEST(StagedTraffic, PinnedMemoryIsAsLargeAsWhatIsReduced) {
  constexpr size_t kNumel = 50'000;
  auto engines = make_device_engines(2, kLocal, {.on_host_bytes = size_t{1} << 60});
  const size_t before = emulated().counters().pinned_bytes;
  for (const size_t numel : {size_t{1}, kNumel}) {
    on_device(engines, {"", OperationKind::kAllReduce, DType::kF32, numel, 0, [=](Context& c, void* data, void*) {
                          return all_reduce(c, data, numel, DType::kF32, ReduceOp::kSum, nullptr);
                        }});
  }
  EXPECT_LT(emulated().counters().pinned_bytes - before, 2 * (4 * kNumel + (64 << 10) + (16 << 10)));
}

TEST(StagedTraffic, OfASmallReductionEachByteCrossesOnceEachWay) {
  constexpr size_t kNumel = 1000;
  const Case one{"", OperationKind::kAllReduce, DType::kF32, kNumel, 0, [](Context& c, void* data, void*) {
                   return all_reduce(c, data, kNumel, DType::kF32, ReduceOp::kSum, nullptr);
                 }};
  for (const size_t threshold : {4 * kNumel - 1, 4 * kNumel}) {
    const bool is_on_host = threshold == 4 * kNumel;
    auto engines = make_device_engines(3, kTcp, {.on_host_bytes = threshold});
    emulated().reset_counters();
    on_device(engines, one);
    const auto counters = emulated().counters();
    EXPECT_EQ(counters.launches.empty(), is_on_host);
    if (!is_on_host) continue;
    const size_t once = 3 * 4 * kNumel;  // and once more for the test itself, up and down
    EXPECT_EQ(counters.bytes_to_host, 2 * once);
    EXPECT_EQ(counters.bytes_to_device, 2 * once);
  }
}

TEST_P(OnDevice, SegmentsOfASmallReductionAreTakenIn) {
  constexpr size_t kNumel = 3'000, kFirst = 1'100, kGap = 64;
  const Case one{
      "", OperationKind::kAllReduce, DType::kF32, kNumel, kNumel, [](Context& c, void* from, void* to) {
        const InputSegments segments(
            {{0, kFirst, from}, {kFirst + kGap, kNumel - kFirst - kGap, static_cast<float*>(from) + kFirst}});
        return all_reduce(c, to, kNumel, DType::kF32, ReduceOp::kAvg, nullptr, {}, segments);
      }};
  auto engines = make_device_engines(2, GetParam(), {});
  auto reference = make_cpu_engines(2, GetParam());
  expect_equal(on_device(engines, one), on_cpu(reference, one), "all_reduce of segments");
}

TEST_P(OnDevice, MessagesOfDeviceAndHostKeepTheirOrder) {
  auto engines = make_device_engines(2, GetParam());
  constexpr size_t kLarge = 3 * PinnedChannel::kPieceBytes + 1000, kSmall = 40;
  const Operation message = stamp(0, 1, OperationKind::kPointToPoint);
  const auto bytes_of = [](int tag, size_t count) { return Bytes(count, static_cast<uint8_t>(tag)); };
  run_together({[&] {
                  DeviceUser user(device_of_rank(0));
                  std::vector<Bytes> host;
                  std::vector<std::shared_ptr<Work>> works;
                  Operation sent = message;
                  for (int tag = 0; tag < 12; ++tag) {
                    sent.variant = static_cast<uint32_t>(tag);
                    const Bytes values = bytes_of(tag, tag % 3 == 0 ? kLarge : kSmall);
                    if (tag % 2 == 0) {
                      void* const there = user.upload(values);
                      works.push_back(engines[0]->submit_send(1, there, values.size(), sent, 30s, user.ready()));
                    } else {
                      host.push_back(values);
                      works.push_back(engines[0]->submit_send(1, host.back().data(), values.size(), sent, 30s));
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
    EXPECT_CONTAINS(std::string(work->error()->what()), "one rank are on the CPU");
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

// A kernel of the test's own, which takes a while.
void run_slowly(
    Stream stream, std::chrono::nanoseconds duration, std::function<void()> then = [] {}) {
  emulated().call(stream, "slow", [duration, then = std::move(then)] {
    std::this_thread::sleep_for(duration);
    then();
  });
}

// A host that computes waits for the device's part, and the peers for it: either may find out first.
TEST(DeviceFailures, ADeviceThatIsLateForASmallReductionIsNamedByAllRanks) {
  for (const size_t first : {0, 1}) {
    auto engines = make_device_engines(2, kTcp, {});
    std::vector<std::unique_ptr<DeviceUser>> users;
    std::vector<std::shared_ptr<Work>> works;
    for (int r = 0; r < 2; ++r) users.push_back(std::make_unique<DeviceUser>(device_of_rank(r)));
    void* const data[] = {users[0]->upload(Bytes(400, 1)), users[1]->upload(Bytes(400, 1))};
    run_slowly(users[1]->stream(), 1500ms);
    const auto begin = Clock::now();
    for (size_t r = 0; r < 2; ++r) {
      works.push_back(
          engines[r]->submit(stamp(0, 100), 400, r == first ? 300ms : 10s, average(data[r], 100), users[r]->ready()));
    }
    for (const auto& work : works) {
      ASSERT_TRUE(work->wait_for(10s));
      ASSERT_TRUE(work->error());
      EXPECT_EQ(work->error()->rank(), 1) << work->error()->what();
    }
    EXPECT_EQ(works[first]->error()->kind(), ErrorKind::kDeadlineExceeded);
    EXPECT_EQ(works[1 - first]->error()->kind(), ErrorKind::kRemote);
    EXPECT_CONTAINS(std::string(works[first]->error()->what()),
                    first == 1 ? "emulated:1 of rank 1 is still busy with what it had to do before" : "rank 1");
    EXPECT_LT(Clock::now() - begin, 1500ms + 2s);  // rank 1 fails once its device has let go of the tensor
  }
}

// Its tensors are the program's again, which may give their memory to others.
TEST(DeviceFailures, AnOperationHasFailedOnceTheDeviceIsDoneWithItsTensors) {
  auto engines = make_device_engines(2, kLocal);
  DeviceUser user(device_of_rank(0));
  std::atomic<bool> is_done_with_them{false};
  const auto work = engines[0]->submit(
      stamp(0, 100), 400, 10s,
      [&](Context& context) -> uint64_t {
        run_slowly(context.stream, 100ms, [&] { is_done_with_them = true; });
        throw Error(ErrorKind::kDevice, "no memory", 0);
      },
      user.ready());
  ASSERT_TRUE(work->wait_for(10s));
  EXPECT_CONTAINS(std::string(work->error()->what()), "no memory");
  EXPECT_TRUE(is_done_with_them);
}

TEST(DeviceFailures, PinnedMemoryIsKeptForADeviceThatIsLate) {
  auto engines = make_device_engines(2, kLocal);
  DeviceUser user(device_of_rank(0));
  uint8_t* const data = user.upload(Bytes(8, 1));
  const size_t pinned_before = emulated().counters().pinned_bytes;
  std::atomic<bool> has_copied{false}, user_is_behind{false};
  const auto work = engines[0]->submit(
      stamp(0, 2), 8, 50ms,
      [&](Context& context) -> uint64_t {
        run_slowly(context.stream, 300ms);
        emulated().copy_to_host(context.pinned(8), data, 8, context.stream);
        emulated().call(context.stream, "copied", [&] { has_copied = true; });
        return 0;
      },
      user.ready());
  ASSERT_TRUE(work->wait_for(10s));
  const auto error = user.wait(work);
  ASSERT_TRUE(error);
  EXPECT_CONTAINS(std::string(error->what()), "of this rank has not finished it in time");
  emulated().call(user.stream(), "next", [&] { user_is_behind = has_copied.load(); });
  engines.clear();  // ends the process if the copy is still to come
  EXPECT_EQ(emulated().counters().pinned_bytes, pinned_before);
  emulated().synchronize(user.stream());
  EXPECT_TRUE(user_is_behind);
}

TEST(DeviceFailures, PinnedMemoryIsLeftToADeviceThatHasFailed) {
  auto engines = make_device_engines(2, kTcp);
  const Device device = device_of_rank(0);
  DeviceUser user(device);
  uint8_t* const data = user.upload(Bytes(400, 1));
  const auto work = engines[0]->submit(
      stamp(0, 100), 400, 10s,
      [&](Context& context) -> uint64_t {
        emulated().fail_next_kernel(device.index);
        run_slowly(context.stream, 20ms);
        emulated().run(context.stream, "failing", [] {});
        run_slowly(context.stream, 300ms);
        context.group.send(1, data, 400);
        return 0;
      },
      user.ready());
  ASSERT_TRUE(work->wait_for(10s));
  EXPECT_CONTAINS(std::string(work->error()->what()), "told to fail");
  engines.clear();  // ends the process if the copy is still to come
  EXPECT_THROW(emulated().synchronize(device), Error);
  emulated().reset_errors();
}

// Every look takes locks that the program's own launches need.
TEST(DeviceWaits, ADeviceIsAskedSeldomAndOfTheFirstOperationOnly) {
  constexpr int kNumOperations = 16;
  auto engines = make_device_engines(2, kLocal);
  DeviceUser user(device_of_rank(0));
  run_slowly(user.stream(), 300ms);
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < kNumOperations; ++i) {
    works.push_back(engines[0]->submit(
        stamp(0, 100), 400, 10s, [](Context&) -> uint64_t { return 0; }, user.ready()));
  }
  for (const auto& work : works) ASSERT_TRUE(work->wait_enqueued_for(10s));
  emulated().reset_counters();
  std::this_thread::sleep_for(100ms);
  const uint64_t queries = emulated().counters().event_queries;
  EXPECT_GT(queries, 0u);
  EXPECT_LE(queries, 600u);  // twice per look: one every 16th of the time that it took so far, a millisecond at most
  for (const auto& work : works) {
    ASSERT_TRUE(work->wait_for(10s));
    EXPECT_FALSE(work->error());
  }
}

}  // namespace
}  // namespace bagua::testing

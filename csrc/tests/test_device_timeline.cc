// When an operation ran on a device, on the host's clock: measured by events, compared with what the device's own queue
// has seen of that clock.
#include <algorithm>

#include "csrc/codecs/codec.h"
#include "csrc/engine/device_clock.h"
#include "csrc/tests/test_device_world.h"

namespace bagua::testing {
namespace {

constexpr Device kDevice{DeviceKind::kEmulated, 0};
// A reference is known to within half of the longest wait for it.
constexpr int64_t kTolerance = 1'000'000;

// When the stream comes to this point, after `pause`.
std::shared_ptr<std::atomic<int64_t>> note_time(Stream stream, std::chrono::nanoseconds pause = 0ns) {
  auto time_ns = std::make_shared<std::atomic<int64_t>>(0);
  emulated().call(stream, "note_time", [time_ns, pause] {
    std::this_thread::sleep_for(pause);
    time_ns->store(EventLog::now_ns());
  });
  return time_ns;
}

TEST(DeviceTimeline, TimingEventsMeasureWhatLiesBetween) {
  DeviceUser user(kDevice);
  const auto begin = emulated().create_timing_event(kDevice), end = emulated().create_timing_event(kDevice);
  const auto other = emulated().create_event(kDevice);
  emulated().record(begin, user.stream());
  EXPECT_THROW(emulated().elapsed_ns(begin, end), Error) << "the second was never recorded";
  const auto begin_ns = note_time(user.stream()), end_ns = note_time(user.stream(), 5ms);
  emulated().record(end, user.stream());
  emulated().record(other, user.stream());
  EXPECT_THROW(emulated().elapsed_ns(begin, end), Error) << "the second was not reached";
  const auto synchronized_ns = note_time(user.stream());
  emulated().synchronize(user.stream());
  const int64_t elapsed_ns = emulated().elapsed_ns(begin, end);
  EXPECT_GE(elapsed_ns + 1000, *end_ns - *begin_ns);  // a float of milliseconds has as many digits
  EXPECT_LE(*end_ns - *begin_ns, *synchronized_ns - *begin_ns);
  EXPECT_THROW(emulated().elapsed_ns(begin, other), Error) << "which is no timing event";
  for (const auto event : {begin, end, other}) emulated().destroy_event(event);
}

TEST(DeviceTimeline, TheClockOfADeviceIsComparedWithTheHosts) {
  DeviceUser user(kDevice);
  DeviceClock clock(user.stream());
  const auto event = emulated().create_timing_event(kDevice);
  emulated().record(event, user.stream());
  emulated().synchronize(user.stream());
  EXPECT_EQ(clock.host_ns(event), std::nullopt) << "nothing was compared yet";
  for (int i = 0; i < 100 && !clock.host_ns(event); ++i) {
    clock.renew_if_old();
    std::this_thread::sleep_for(10ms);  // in vain on a machine that is busy with other things
  }
  for (int i = 0; i < 20; ++i) {
    const auto before_ns = note_time(user.stream(), 1ms * (i % 3));
    emulated().record(event, user.stream());
    const auto after_ns = note_time(user.stream());
    emulated().synchronize(user.stream());
    const auto event_ns = clock.host_ns(event);
    ASSERT_TRUE(event_ns);
    EXPECT_GE(*event_ns, *before_ns - kTolerance);
    EXPECT_LE(*event_ns, *after_ns + kTolerance);
  }
  emulated().destroy_event(event);
}

TEST(DeviceTimeline, ABusyDeviceHoldsNobodyUp) {
  DeviceUser user(kDevice);
  DeviceClock clock(user.stream());
  note_time(user.stream(), 100ms);
  const auto begin = Clock::now();
  clock.renew_if_old();
  clock.renew_if_old();  // not again so soon
  EXPECT_LT(Clock::now() - begin, 50ms);
  const auto event = emulated().create_timing_event(kDevice);
  emulated().record(event, user.stream());
  emulated().synchronize(user.stream());
  EXPECT_EQ(clock.host_ns(event), std::nullopt);
  emulated().destroy_event(event);
}

struct OfRank {
  std::vector<Event> events;
  std::shared_ptr<std::atomic<int64_t>> ready_ns, kernel_begin_ns, kernel_end_ns, seen_ns;
  int64_t submitted_ns = 0;
};

// A compressed all_reduce whose input is ready late, and behind which the stream goes on.
OfRank run_one(Engine& engine, int rank, bool with_codec) {
  constexpr size_t kNumel = 5000;
  DeviceUser user(device_of_rank(rank));
  OfRank found;
  void* const data = user.upload(Bytes(kNumel * sizeof(float), 0));
  found.ready_ns = note_time(user.stream(), 30ms);
  found.submitted_ns = EventLog::now_ns();
  const auto work = engine.submit(
      stamp(0, kNumel), kNumel * sizeof(float), 30s,
      [&](Context& context) {
        found.kernel_begin_ns = note_time(context.stream);
        const Codec* const codec = with_codec ? &get_codec("minmax_uint8") : nullptr;
        const uint64_t result = collectives::all_reduce(context, data, kNumel, DType::kF32, ReduceOp::kSum, codec);
        found.kernel_end_ns = note_time(context.stream, 5ms);
        return result;
      },
      user.ready());
  EXPECT_EQ(user.wait(work).has_value(), false);
  found.seen_ns = note_time(user.stream());
  EXPECT_TRUE(work->wait_for(30s));
  emulated().synchronize(user.stream());
  found.events = engine.events().take(true);
  return found;
}

int64_t begin_of(const OfRank& found) {
  for (const Event& event : found.events) {
    if (event.kind == EventKind::kOperation) return event.begin_ns;
  }
  return 0;
}

void expect_as_the_device_saw_it(const OfRank& found, bool with_codec) {
  const auto only = [&](EventKind kind) {
    const auto is_it = [kind](const Event& event) { return event.kind == kind; };
    EXPECT_EQ(std::count_if(found.events.begin(), found.events.end(), is_it), 1);
    return *std::find_if(found.events.begin(), found.events.end(), is_it);
  };
  const Event queued = only(EventKind::kQueued), operation = only(EventKind::kOperation);
  EXPECT_GE(queued.begin_ns, found.submitted_ns);
  EXPECT_LE(queued.end_ns, operation.begin_ns);
  EXPECT_GE(operation.begin_ns, *found.ready_ns - kTolerance) << "before its input was ready";
  EXPECT_LE(operation.begin_ns, *found.kernel_begin_ns + kTolerance) << "after its first kernel";
  EXPECT_GE(operation.end_ns, *found.kernel_end_ns - kTolerance) << "before its last kernel had ended";
  EXPECT_LE(operation.end_ns, *found.seen_ns + kTolerance) << "after the stream had gone on behind it";
  size_t num_wire = 0;
  for (const Event& event : found.events) {
    num_wire += event.kind == EventKind::kWire;
    EXPECT_TRUE(event.kind == EventKind::kQueued || event.kind == EventKind::kOperation ||
                event.kind == EventKind::kWire)
        << "the host enqueued that in no time, which says nothing of the device's work";
  }
  EXPECT_EQ(num_wire > 0, with_codec);
}

TEST(DeviceTimeline, AnOperationHasTheDevicesBeginAndEnd) {
  for (const bool with_codec : {true, false}) {
    auto engines = make_device_engines(2, kTcp);
    std::vector<OfRank> found(2);
    const auto run_both = [&] {
      run_together({[&] { found[0] = run_one(*engines[0], 0, with_codec); },
                    [&] { found[1] = run_one(*engines[1], 1, with_codec); }});
    };
    // On a machine that is busy with other things the clocks are not compared at the first attempt.
    const auto is_compared = [](const OfRank& one) { return begin_of(one) >= *one.ready_ns - kTolerance; };
    const auto end = Clock::now() + 10s;
    do run_both();
    while (!std::all_of(found.begin(), found.end(), is_compared) && Clock::now() < end);
    for (int repetition = 0; repetition < 3; ++repetition) {
      run_both();
      for (const OfRank& one : found) expect_as_the_device_saw_it(one, with_codec);
    }
  }
}

TEST(DeviceTimeline, EventsAreUsedAgain) {
  const auto num_events = [] { return emulated().counters().num_events; };
  const int num_before = num_events();
  {
    DeviceSide side(kDevice);
    auto first = side.take_interval();
    const auto second = side.take_interval();
    const int num_of_two = num_events();
    EXPECT_NE(first->begin, second->begin);
    const device::Event begin = first->begin;
    for (int i = 0; i < 3; ++i) {
      first.reset();
      first = side.take_interval();
      EXPECT_EQ(first->begin, begin);
    }
    EXPECT_EQ(num_events(), num_of_two);
  }
  EXPECT_EQ(num_events(), num_before);
}

}  // namespace
}  // namespace bagua::testing

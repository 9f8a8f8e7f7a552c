// The emulated device keeps what runtime.h promises and shows what it is for: the host cannot touch its memory, streams
// run late, a missing event or a use after free is seen, and every public kernel has the CPU's bits on it.
#include "csrc/tests/emulated_device/emulated_runtime.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "csrc/device/memory.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/centroid.h"
#include "csrc/kernels/copy_to_cold.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/half_codec.h"
#include "csrc/kernels/minifloat.h"
#include "csrc/kernels/minmax_uint8.h"
#include "csrc/kernels/onebit.h"
#include "csrc/kernels/qsgd.h"
#include "csrc/kernels/reduce.h"
#include "csrc/kernels/subtract.h"
#include "csrc/kernels/topk.h"
#include "csrc/kernels/topk_chunk.h"
#include "csrc/kernels/weighted_sum.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using device::EmulatedRuntime;
using device::Event;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr Device kFirst{DeviceKind::kEmulated, 0};
constexpr Device kSecond{DeviceKind::kEmulated, 1};
constexpr Stream kDefault{kFirst, nullptr};

// The error's kind, and that its text holds `part`.
void expect_error(ErrorKind kind, const std::string& part, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    return;
  }
  ADD_FAILURE() << "no error, expected one with: " << part;
}

class Emulated : public ::testing::Test {
 protected:
  EmulatedRuntime runtime{2, 1};

  // A kernel that ends when `gate` opens.
  void hold(Stream stream, const std::shared_ptr<std::atomic<bool>>& gate) {
    runtime.run(stream, "hold", [gate] { gate->wait(false); });
  }
  static void open(const std::shared_ptr<std::atomic<bool>>& gate) {
    gate->store(true);
    gate->notify_all();
  }
  static std::shared_ptr<std::atomic<bool>> gate() { return std::make_shared<std::atomic<bool>>(false); }

  float* floats(size_t numel, Stream stream) {
    return static_cast<float*>(runtime.allocate(numel * sizeof(float), stream));
  }
  // A kernel that stores `value`.
  void store(float* to, float value, Stream stream) {
    runtime.run(stream, "store", [=, this] { *static_cast<float*>(runtime.host_address(to)) = value; });
  }
  // Returns what the device holds once the stream has come to it.
  float load(const float* from, Stream stream) {
    float* const pinned = static_cast<float*>(runtime.allocate_pinned(sizeof(float)));
    runtime.copy_to_host(pinned, from, sizeof(float), stream);
    runtime.synchronize(stream);
    const float value = *pinned;
    runtime.free_pinned(pinned);
    return value;
  }
};

// Each death in a process that ran the test up to there: a forked one would have no device.
class EmulatedDeathTest : public Emulated {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// ---- memory -------------------------------------------------------------------------------------------------------

TEST_F(EmulatedDeathTest, TheHostCannotTouchTheMemory) {
  float* const memory = floats(4, kDefault);
  runtime.synchronize(kDefault);
  EXPECT_DEATH({ *const_cast<volatile float*>(memory) = 1.0f; }, "");
  EXPECT_DEATH({ (void)*const_cast<volatile float*>(memory); }, "");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(write(ends[1], memory, 4), -1);
  EXPECT_EQ(errno, EFAULT);
  close(ends[0]);
  close(ends[1]);
  runtime.free(memory, kDefault);
}

TEST_F(EmulatedDeathTest, AKernelThatReachesOverAPageDies) {
  char* const memory = static_cast<char*>(runtime.allocate(8192, kDefault));
  runtime.synchronize(kDefault);
  volatile char* const seen = static_cast<char*>(runtime.host_address(memory));
  seen[8191] = 1;
  EXPECT_DEATH(seen[8192] = 1, "");
  EXPECT_DEATH(seen[-1] = 1, "");
}

TEST_F(EmulatedDeathTest, AWriteNextToABlockIsFoundWhenItIsFreed) {
  for (const int where : {-1, 300}) {
    EXPECT_DEATH(
        {
          char* const memory = static_cast<char*>(runtime.allocate(300, kDefault));
          runtime.synchronize(kDefault);
          static_cast<char*>(runtime.host_address(memory))[where] = 1;
          runtime.free(memory, kDefault);
          runtime.synchronize(kDefault);
        },
        "something wrote before or after");
  }
}

TEST_F(Emulated, MemoryIsAlignedDistinctAndUndefined) {
  std::vector<float*> blocks;
  for (size_t numel : {1, 7, 64, 1000, 100000}) {
    float* const memory = floats(numel, kDefault);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    runtime.synchronize(kDefault);
    const float* const seen = static_cast<float*>(runtime.host_address(memory));
    for (size_t i = 0; i < numel; ++i) ASSERT_TRUE(std::isnan(seen[i])) << i;
    for (float* other : blocks) EXPECT_NE(memory, other);
    blocks.push_back(memory);
  }
  EXPECT_EQ(runtime.counters().live_bytes, 4u * (1 + 7 + 64 + 1000 + 100000));
  for (float* memory : blocks) runtime.free(memory, kDefault);
  EXPECT_EQ(runtime.counters().live_bytes, 0u);
  EXPECT_EQ(runtime.allocate(0, kDefault), nullptr);
  runtime.free(nullptr, kDefault);
}

TEST_F(Emulated, HostAddressTakesWhatIsLiveAndNothingElse) {
  char* const memory = static_cast<char*>(runtime.allocate(1000, kDefault));
  runtime.synchronize(kDefault);
  char* const seen = static_cast<char*>(runtime.host_address(memory));
  EXPECT_EQ(runtime.host_address(memory + 999), seen + 999);
  expect_error(ErrorKind::kDevice, "no live memory", [&] { runtime.host_address(memory + 1000); });
  expect_error(ErrorKind::kDevice, "no live memory", [&] { runtime.host_address(memory - 1); });
  int local = 0;
  expect_error(ErrorKind::kDevice, "no memory of an emulated device", [&] { runtime.host_address(&local); });
  runtime.free(memory, kDefault);
  runtime.synchronize(kDefault);
  expect_error(ErrorKind::kDevice, "no live memory", [&] { runtime.host_address(memory); });
}

// The stream that uses the memory still has it; what the host enqueues after the free is refused.
TEST_F(Emulated, FreeIsInTheStreamsOrder) {
  float* const memory = floats(1, kDefault);
  float* const copy = floats(1, kDefault);
  const auto closed = gate();
  hold(kDefault, closed);
  store(memory, 5.0f, kDefault);
  runtime.copy(copy, memory, 4, kDefault);
  runtime.free(memory, kDefault);
  EXPECT_EQ(runtime.counters().live_bytes, 4u);
  expect_error(ErrorKind::kDevice, "after it was freed", [&] { runtime.fill_zero(memory, 4, kDefault); });
  open(closed);
  EXPECT_EQ(load(copy, kDefault), 5.0f);
  runtime.free(copy, kDefault);
}

TEST_F(Emulated, AKernelThatUsesFreedMemoryFailsTheDevice) {
  float* const memory = floats(1, kDefault);
  runtime.free(memory, kDefault);
  store(memory, 1.0f, kDefault);
  expect_error(ErrorKind::kDevice, "store", [&] { runtime.synchronize(kDefault); });
  expect_error(ErrorKind::kDevice, "no live memory", [&] { runtime.allocate(4, kDefault); });
}

// Memory belongs to the stream that allocated it until another one waits for an event.
TEST_F(Emulated, AnotherStreamMustWaitForTheAllocation) {
  const Stream other = runtime.create_stream(kFirst);
  const auto closed = gate();
  hold(kDefault, closed);
  float* const memory = floats(1, kDefault);
  store(memory, 1.0f, other);
  expect_error(ErrorKind::kDevice, "before its allocation", [&] { runtime.synchronize(other); });
  open(closed);
  expect_error(ErrorKind::kDevice, "before its allocation", [&] { runtime.synchronize(kFirst); });
  runtime.reset_errors();
  const Event event = runtime.create_event(kFirst);
  runtime.record(event, kDefault);
  runtime.wait(other, event);
  store(memory, 2.0f, other);
  EXPECT_EQ(load(memory, other), 2.0f);
  runtime.destroy_event(event);
  runtime.free(memory, other);
  runtime.destroy_stream(other);
}

TEST_F(EmulatedDeathTest, WhatOnlyABugFreesEndsTheProcess) {
  float* const memory = floats(1, kDefault);
  void* const pinned = runtime.allocate_pinned(64);
  int local = 0;
  EXPECT_DEATH(runtime.free(&local, kDefault), "is no memory of the emulated device");
  EXPECT_DEATH(runtime.free(memory + 1, kDefault), "no live block of emulated:0 begins there");
  EXPECT_DEATH(runtime.free(memory, (Stream{kSecond, nullptr})), "on a stream of emulated:1");
  EXPECT_DEATH(
      {
        const auto closed = gate();
        hold(kDefault, closed);
        runtime.free(memory, kDefault);
        runtime.free(memory, kDefault);
      },
      "is freed twice");
  EXPECT_DEATH(runtime.free_pinned(&local), "no pinned memory begins there");
  EXPECT_DEATH(
      {
        const auto closed = gate();
        hold(kDefault, closed);
        runtime.copy_from_host(memory, pinned, 4, kDefault);
        runtime.free_pinned(pinned);
      },
      "1 copies still use it");
  EXPECT_DEATH(runtime.destroy_stream({kFirst, &local}), "it is no stream");
  EXPECT_DEATH(runtime.destroy_event(&local), "it is no event");
  runtime.free(memory, kDefault);
  runtime.free_pinned(pinned);
}

TEST_F(Emulated, MemoryEndsAtTheLimit) {
  runtime.limit_memory(1000);
  void* const first = runtime.allocate(600, kDefault);
  expect_error(ErrorKind::kDevice, "emulated:0 is out of memory: asked for 401 bytes, 600 bytes are in use of 1000",
               [&] { runtime.allocate(401, kDefault); });
  void* const second = runtime.allocate(400, kDefault);
  void* const elsewhere = runtime.allocate(1000, {kSecond, nullptr});
  runtime.free(first, kDefault);  // at once in the host's order
  runtime.free(runtime.allocate(600, kDefault), kDefault);
  runtime.free(second, kDefault);
  runtime.free(elsewhere, {kSecond, nullptr});
}

TEST_F(Emulated, AddressesAreReusedOnlyWhenNoOthersAreLeft) {
  const size_t bytes = device::Arena::kAddressSpace / 4;
  device::Arena arena("arena");
  void* const first = arena.reserve(bytes);
  void* const second = arena.reserve(bytes);
  arena.mark_freed(first);
  arena.release(first);
  void* const third = arena.reserve(bytes);
  EXPECT_NE(third, first);
  void* const fourth = arena.reserve(bytes);  // as long as the first gap; what is left at the end is not
  EXPECT_LT(fourth, second);
  expect_error(ErrorKind::kDevice, "no gap of", [&] { arena.reserve(bytes); });
}

// ---- copies -------------------------------------------------------------------------------------------------------

TEST_F(Emulated, CopiesAndFillsMoveTheBytesAndAreCounted) {
  const Stream second{kSecond, nullptr};
  const size_t bytes = 1000;
  uint8_t* const from = static_cast<uint8_t*>(runtime.allocate_pinned(bytes));
  uint8_t* const to = static_cast<uint8_t*>(runtime.allocate_pinned(bytes));
  for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<uint8_t>(i * 7 + 1);
  char* const a = static_cast<char*>(runtime.allocate(bytes, kDefault));
  char* const b = static_cast<char*>(runtime.allocate(bytes, kDefault));
  char* const c = static_cast<char*>(runtime.allocate(bytes, second));
  const Event event = runtime.create_event(kFirst), ready = runtime.create_event(kSecond);
  runtime.copy_from_host(a, from, bytes, kDefault);
  runtime.copy(b, a, bytes, kDefault);
  runtime.fill_zero(b + 10, 5, kDefault);
  runtime.record(ready, second);  // c is there
  runtime.wait(kDefault, ready);
  runtime.copy(c, b, bytes, kDefault);  // to the other device
  runtime.record(event, kDefault);
  runtime.wait(second, event);
  runtime.copy_to_host(to, c, bytes, second);
  runtime.synchronize(second);
  for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(to[i], i >= 10 && i < 15 ? 0 : from[i]) << i;
  const auto counters = runtime.counters();
  EXPECT_EQ(counters.bytes_to_device, bytes);
  EXPECT_EQ(counters.bytes_to_host, bytes);
  EXPECT_EQ(counters.bytes_on_device, 2 * bytes);
  EXPECT_EQ(counters.pinned_bytes, 2 * bytes);
  EXPECT_EQ(counters.live_bytes, 3 * bytes);
  EXPECT_EQ(counters.num_events, 2);
  runtime.reset_counters();
  EXPECT_EQ(runtime.counters().bytes_on_device, 0u);
  EXPECT_EQ(runtime.counters().live_bytes, 3 * bytes);
  runtime.free(a, kDefault);
  runtime.free(b, kDefault);
  runtime.free(c, second);
  runtime.free_pinned(from);
  runtime.free_pinned(to);
  runtime.destroy_event(event);
  runtime.destroy_event(ready);
}

TEST_F(Emulated, WhatCudaRefusesIsAnError) {
  char* const memory = static_cast<char*>(runtime.allocate(256, kDefault));
  char* const elsewhere = static_cast<char*>(runtime.allocate(256, {kSecond, nullptr}));
  char* const pinned = static_cast<char*>(runtime.allocate_pinned(256));
  char pageable[256];
  const auto kDev = ErrorKind::kDevice;
  expect_error(kDev, "is not pinned", [&] { runtime.copy_from_host(memory, pageable, 256, kDefault); });
  expect_error(kDev, "is not pinned", [&] { runtime.copy_to_host(pageable, memory, 256, kDefault); });
  expect_error(kDev, "is not pinned", [&] { runtime.copy_to_host(memory, memory, 256, kDefault); });
  expect_error(kDev, "end of the pinned block", [&] { runtime.copy_to_host(pinned + 1, memory, 256, kDefault); });
  expect_error(kDev, "over the block's end", [&] { runtime.copy_to_host(pinned, memory + 1, 256, kDefault); });
  expect_error(kDev, "no live memory", [&] { runtime.copy_from_host(pinned, pinned, 256, kDefault); });
  expect_error(kDev, "no live memory", [&] { runtime.copy_from_host(elsewhere, pinned, 256, kDefault); });
  expect_error(kDev, "no memory of an emulated device", [&] { runtime.copy(memory, pinned, 256, kDefault); });
  expect_error(kDev, "neither end", [&] { runtime.copy(elsewhere, elsewhere + 128, 128, kDefault); });
  expect_error(kDev, "overlap", [&] { runtime.copy(memory, memory + 100, 101, kDefault); });
  expect_error(kDev, "over the block's end", [&] { runtime.fill_zero(memory + 200, 57, kDefault); });
  expect_error(kDev, "is no stream", [&] { runtime.allocate(1, {kFirst, pageable}); });
  expect_error(kDev, "is no event", [&] { runtime.record(pageable, kDefault); });
  expect_error(ErrorKind::kInvalidArgument, "emulated:2", [&] { runtime.create_stream({DeviceKind::kEmulated, 2}); });
  expect_error(ErrorKind::kInvalidArgument, "cuda:0", [&] { runtime.create_event({DeviceKind::kCuda, 0}); });
  const Event event = runtime.create_event(kSecond);
  expect_error(kDev, "the event is of emulated:1", [&] { runtime.record(event, kDefault); });
  const Stream stream = runtime.create_stream(kFirst);
  expect_error(kDev, "on emulated:0, not on emulated:1", [&] { runtime.allocate(1, {kSecond, stream.handle}); });
  runtime.destroy_stream(stream);
  expect_error(kDev, "was destroyed", [&] { runtime.fill_zero(memory, 1, stream); });
  // None of it was enqueued.
  runtime.synchronize(kDefault);
  EXPECT_EQ(runtime.counters().bytes_to_device + runtime.counters().bytes_to_host, 0u);
  runtime.free_pinned(pinned);
}

TEST_F(Emulated, AKernelOfAnotherDeviceFails) {
  float* const memory = floats(1, kDefault);
  runtime.synchronize(kDefault);
  store(memory, 1.0f, {kSecond, nullptr});
  expect_error(ErrorKind::kDevice, "a kernel of emulated:1 uses memory of emulated:0",
               [&] { runtime.synchronize(kSecond); });
  store(memory, 2.0f, kDefault);  // the other device is as well as before
  EXPECT_EQ(load(memory, kDefault), 2.0f);
}

// ---- streams and events -------------------------------------------------------------------------------------------

TEST_F(Emulated, AStreamKeepsItsOrderAndRunsLate) {
  runtime.set_delay(milliseconds(2));
  std::vector<int> order;
  int num_late = 0;
  for (int i = 0; i < 40; ++i) {
    runtime.run(kDefault, "push", [&order, i] { order.push_back(i); });
    num_late += !runtime.is_idle(kDefault);
  }
  EXPECT_GT(num_late, 10);
  runtime.synchronize(kDefault);
  EXPECT_TRUE(runtime.is_idle(kDefault));
  ASSERT_EQ(order.size(), 40u);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_EQ(runtime.counters().launches["push"], 40u);
}

TEST_F(Emulated, NothingIsLateWithoutADelay) {
  runtime.set_delay(milliseconds(0));
  const auto begin = steady_clock::now();
  for (int i = 0; i < 100; ++i) runtime.run(kDefault, "nothing", [] {});
  runtime.synchronize(kDefault);
  EXPECT_LT(steady_clock::now() - begin, milliseconds(100));
}

// One stream writes, another reads. With the event it reads what was written, without it often what was there before.
// (Atomically, for the thread sanitizer's sake: it takes a missing event for what it is, a race.)
TEST_F(Emulated, AMissingEventShows) {
  const Stream writer = runtime.create_stream(kFirst), reader = runtime.create_stream(kFirst);
  void* const memory = runtime.allocate(sizeof(int), kDefault);
  runtime.synchronize(kDefault);
  const auto shared = [&] { return std::atomic_ref<int>(*static_cast<int*>(runtime.host_address(memory))); };
  const Event event = runtime.create_event(kFirst);
  int num_wrong[2] = {0, 0};
  for (const bool has_event : {false, true}) {
    for (int i = 1; i <= 60; ++i) {
      runtime.run(writer, "write", [=] { shared().store(i); });
      if (has_event) {
        runtime.record(event, writer);
        runtime.wait(reader, event);
      }
      int seen = 0;
      runtime.run(reader, "read", [=, &seen] { seen = shared().load(); });
      runtime.synchronize(reader);
      num_wrong[has_event] += seen != i;
      runtime.synchronize(writer);
    }
  }
  EXPECT_GT(num_wrong[false], 5);
  EXPECT_EQ(num_wrong[true], 0);
  runtime.destroy_event(event);
  runtime.destroy_stream(writer);
  runtime.destroy_stream(reader);
}

TEST_F(Emulated, AnEventIsItsLastRecordAtTheTimeOfTheCall) {
  const Stream first = runtime.create_stream(kFirst), second = runtime.create_stream(kFirst);
  const Stream other_device{kSecond, nullptr};
  const Event event = runtime.create_event(kFirst);
  EXPECT_TRUE(runtime.is_done(event));  // never recorded
  const auto one = gate(), two = gate();
  runtime.wait(second, event);  // waits for nothing
  runtime.synchronize(second);

  hold(first, one);
  runtime.record(event, first);
  EXPECT_FALSE(runtime.is_done(event));
  runtime.wait(second, event);
  runtime.wait(other_device, event);
  hold(first, two);
  runtime.record(event, first);  // who waits already does so for the first one
  runtime.wait(kDefault, event);
  EXPECT_FALSE(runtime.is_idle(second));
  EXPECT_FALSE(runtime.is_idle(other_device));
  open(one);
  runtime.synchronize(second);
  runtime.synchronize(other_device);
  EXPECT_FALSE(runtime.is_done(event));
  EXPECT_FALSE(runtime.is_idle(kDefault));
  runtime.destroy_event(event);  // legal while a stream waits for it
  open(two);
  runtime.synchronize(kDefault);
  runtime.destroy_stream(first);
  runtime.destroy_stream(second);
}

TEST_F(Emulated, TheHostWaitsForAnEvent) {
  const Event event = runtime.create_event(kFirst);
  runtime.synchronize(event);  // never recorded
  std::atomic<bool> is_done{false};
  const auto closed = gate();
  hold(kDefault, closed);
  runtime.record(event, kDefault);
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(5));
    is_done = true;
    open(closed);
  });
  runtime.synchronize(event);
  EXPECT_TRUE(is_done);
  EXPECT_TRUE(runtime.is_done(event));
  opener.join();
  runtime.destroy_event(event);
}

TEST_F(Emulated, ADestroyedStreamStillDoesItsWork) {
  const auto closed = gate();
  std::atomic<bool> has_run{false};
  const Stream stream = runtime.create_stream(kFirst);
  EXPECT_EQ(runtime.counters().num_streams, 1);
  hold(stream, closed);
  runtime.run(stream, "run", [&] { has_run = true; });
  runtime.destroy_stream(stream);  // does not wait
  EXPECT_EQ(runtime.counters().num_streams, 0);
  EXPECT_FALSE(has_run);
  open(closed);
  runtime.synchronize(kFirst);
  EXPECT_TRUE(has_run);
}

TEST_F(Emulated, ManyThreadsUseOneDevice) {
  runtime.set_delay(std::chrono::microseconds(20));
  const Event shared = runtime.create_event(kFirst);
  std::vector<std::thread> threads;
  std::atomic<int> num_right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i) {
        const Stream stream = runtime.create_stream(kFirst);
        float* const memory = floats(8, stream);
        store(memory, static_cast<float>(t * 100 + i), stream);
        runtime.record(shared, stream);
        runtime.wait(stream, shared);
        num_right += load(memory, stream) == static_cast<float>(t * 100 + i);
        runtime.free(memory, stream);
        runtime.destroy_stream(stream);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_right, 100);
  runtime.destroy_event(shared);
  const auto counters = runtime.counters();
  EXPECT_EQ(counters.live_bytes + counters.pinned_bytes, 0u);
  EXPECT_EQ(counters.num_streams + counters.num_events, 0);
}

// ---- failures -----------------------------------------------------------------------------------------------------

TEST_F(Emulated, AFailedKernelIsAStickyErrorOfItsDevice) {
  float* const memory = floats(1, kDefault);
  store(memory, 1.0f, kDefault);
  const Event event = runtime.create_event(kFirst), healthy = runtime.create_event(kSecond);
  runtime.fail_next_kernel(0);
  store(memory, 2.0f, kDefault);
  try {
    store(memory, 3.0f, kDefault);  // legal, unless the kernel was quick
    runtime.record(event, kDefault);
  } catch (const Error&) {
  }
  const auto is_reported = [&](const std::function<void()>& call) {
    expect_error(ErrorKind::kDevice, "emulated:0: store: the kernel was told to fail", call);
  };
  is_reported([&] { runtime.synchronize(kDefault); });
  is_reported([&] { runtime.is_done(event); });
  is_reported([&] { runtime.allocate(4, kDefault); });
  is_reported([&] { runtime.copy(memory, memory, 4, kDefault); });
  is_reported([&] { runtime.record(event, kDefault); });
  is_reported([&] { runtime.wait({kSecond, nullptr}, event); });
  is_reported([&] { runtime.create_stream(kFirst); });
  EXPECT_TRUE(runtime.is_done(healthy));
  runtime.free(memory, kDefault);  // noexcept, and still done
  EXPECT_EQ(runtime.counters().live_bytes, 0u);
  runtime.reset_errors();
  float* const next = floats(1, kDefault);
  store(next, 4.0f, kDefault);
  EXPECT_EQ(load(next, kDefault), 4.0f);
}

// A stream that waits on another device for an event of the one that failed goes on.
TEST_F(Emulated, AFailureReachesItsEvents) {
  const auto closed = gate();
  const Event event = runtime.create_event(kFirst);
  hold(kDefault, closed);
  runtime.fail_next_kernel(0);
  runtime.run(kDefault, "run", [] { FAIL() << "a failed kernel runs"; });
  runtime.record(event, kDefault);
  runtime.wait({kSecond, nullptr}, event);
  open(closed);
  runtime.synchronize(kSecond);
}

TEST_F(Emulated, ACallIsNoKernelAndRunsOnAFailedDevice) {
  bool has_run = false;
  runtime.fail_next_kernel(0);
  runtime.call(kDefault, "call", [] {});  // not the kernel that fails
  runtime.synchronize(kDefault);
  runtime.run(kDefault, "kernel", [] {});
  runtime.call(kDefault, "call", [&] { has_run = true; });
  expect_error(ErrorKind::kDevice, "kernel: the kernel was told to fail", [&] { runtime.synchronize(kDefault); });
  EXPECT_TRUE(has_run);
  EXPECT_EQ(runtime.counters().launches.size(), 1u);
  runtime.reset_errors();
  runtime.call(kDefault, "free", [this] { runtime.host_address(this); });
  expect_error(ErrorKind::kDevice, "emulated:0: free: ", [&] { runtime.synchronize(kDefault); });
}

TEST_F(Emulated, AForkedChildHasNoDeviceAndCanExit) {
  void* const memory = runtime.allocate(64, kDefault);
  const auto closed = gate();
  hold(kDefault, closed);
  const pid_t child = fork();
  if (child == 0) {
    runtime.free(memory, kDefault);  // what a destructor does
    try {
      runtime.fill_zero(memory, 64, kDefault);
    } catch (const Error& error) {
      const bool is_said = std::string(error.what()).find("before this process was forked") != std::string::npos;
      runtime.~EmulatedRuntime();
      _exit(is_said ? 42 : 1);
    }
    _exit(2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
  open(closed);
  runtime.free(memory, kDefault);
}

TEST_F(Emulated, AProcessMayEndWhileStreamsAreBusy) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    static EmulatedRuntime& endless = *new EmulatedRuntime(1);
    const auto closed = gate();
    endless.run(kDefault, "hold", [closed] { closed->wait(false); });
    endless.allocate(1 << 20, kDefault);
    std::exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

// ---- kernels ------------------------------------------------------------------------------------------------------

using Bytes = std::vector<uint8_t>;
using Addresses = std::vector<void*>;

struct Case {
  std::string name;    // of the case
  std::string kernel;  // as counted
  std::vector<Bytes> buffers;
  std::function<void(const Addresses&, Stream)> launch;
};

constexpr size_t kNumel = 5000;  // two or three blocks of every codec, the last one short

Bytes zeros(size_t bytes) { return Bytes(bytes, 0); }

Bytes values(DType dtype, uint64_t seed, bool has_nan = false) {
  Bytes bytes(kNumel * item_bytes(dtype));
  testing::fill_random(dtype, bytes.data(), kNumel, seed);
  if (has_nan) std::memset(bytes.data() + 3000 * item_bytes(dtype), 0xff, item_bytes(dtype));
  return bytes;
}

std::vector<Case> all_cases() {
  using namespace kernels;  // NOLINT: the table names each of them
  constexpr DType kFloating[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16};
  constexpr DType kCodec[] = {DType::kF32, DType::kF16, DType::kBF16};
  std::vector<Case> cases;
  const auto u8 = [](void* memory) { return static_cast<uint8_t*>(memory); };
  const auto u64 = [](void* memory) { return static_cast<uint64_t*>(memory); };
  const auto f32 = [](void* memory) { return static_cast<float*>(memory); };
  const auto name = [](const std::string& kernel, DType dtype) {
    return kernel + " " + std::string(dtype_name(dtype));
  };

  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (!is_defined(op, dtype)) continue;
      const std::string suffix = " " + std::string(reduce_op_name(op));
      cases.push_back(
          {name("reduce_into", dtype) + suffix,
           "reduce_into",
           {values(dtype, 1), values(dtype, 2)},
           [=](const Addresses& at, Stream stream) { reduce_into(op, dtype, at[0], at[1], kNumel, stream); }});
      cases.push_back({name("reduce_many", dtype) + suffix,
                       "reduce_many",
                       {values(dtype, 1), values(dtype, 2), values(dtype, 3), zeros(kNumel * item_bytes(dtype)),
                        zeros(kNumel * item_bytes(dtype))},
                       [=](const Addresses& at, Stream stream) {
                         const void* sources[] = {at[0], at[1], at[2]};
                         void* destinations[] = {at[3], at[4]};
                         reduce_many(op, dtype, sources, 3, destinations, 2, kNumel, stream);
                       }});
    }
  }
  for (const DType dtype : kFloating) {
    const size_t bytes = kNumel * item_bytes(dtype);
    cases.push_back({name("scale", dtype), "scale", {values(dtype, 1)}, [=](const Addresses& at, Stream stream) {
                       scale(dtype, at[0], 0.3, kNumel, stream);
                     }});
    cases.push_back({name("weighted_sum", dtype),
                     "weighted_sum",
                     {values(dtype, 1), values(dtype, 2), zeros(bytes)},
                     [=](const Addresses& at, Stream stream) {
                       const void* sources[] = {at[0], at[1]};
                       const double weights[] = {0.25, 0.7};
                       weighted_sum(dtype, sources, weights, 2, at[2], kNumel, stream);
                     }});
    for (const DType to : kFloating) {
      cases.push_back({name(name("cast", dtype), to),
                       "cast",
                       {values(dtype, 1), zeros(kNumel * item_bytes(to))},
                       [=](const Addresses& at, Stream stream) { cast(dtype, at[0], to, at[1], kNumel, stream); }});
    }
  }
  cases.push_back({"copy_to_cold",
                   "copy_to_cold",
                   {values(DType::kF32, 1), zeros(kNumel * 4)},
                   [=](const Addresses& at, Stream stream) { copy_to_cold(at[1], at[0], kNumel * 4, stream); }});
  cases.push_back({"digest",
                   "digest",
                   {values(DType::kF32, 1), values(DType::kF32, 2), zeros(16)},
                   [=](const Addresses& at, Stream stream) {
                     const DigestPiece pieces[] = {{at[0], kNumel * 4}, {at[1], kNumel * 4}};
                     digest(pieces, 2, u64(at[2]), stream);
                   }});
  cases.push_back({"subtract",
                   "subtract",
                   {values(DType::kF32, 1), values(DType::kF32, 2)},
                   [=](const Addresses& at, Stream stream) { subtract(f32(at[0]), f32(at[1]), kNumel, stream); }});

  // A codec encodes what holds a NaN and what does not, and decodes the latter.
  const auto add_codec = [&](const std::string& codec, const BlockKernels& kernels, int option, size_t wire_bytes) {
    const std::string variant = option == 0 ? "" : " " + std::to_string(option);
    constexpr CounterRng kRng{7, 4096};
    for (const DType dtype : kCodec) {
      for (const bool has_nan : {false, true}) {
        cases.push_back({name(codec + "_encode" + variant, dtype) + (has_nan ? " NaN" : ""),
                         codec + "_encode",
                         {values(dtype, 1, has_nan), zeros(wire_bytes), zeros(8)},
                         [=, &kernels](const Addresses& at, Stream stream) {
                           kernels.encode(option, dtype, at[0], kNumel, u8(at[1]), kRng, u64(at[2]), stream);
                         }});
      }
      Bytes source = values(dtype, 1), wire = zeros(wire_bytes);
      kernels.encode(option, dtype, source.data(), kNumel, wire.data(), kRng, nullptr, Stream{});
      cases.push_back({name(codec + "_decode" + variant, dtype),
                       codec + "_decode",
                       {wire, zeros(kNumel * item_bytes(dtype))},
                       [=, &kernels](const Addresses& at, Stream stream) {
                         kernels.decode(option, dtype, u8(at[0]), kNumel, at[1], stream);
                       }});
      for (const DType feedback : {DType::kF32, DType::kBF16}) {
        cases.push_back({name(name(codec + "_encode_with_residual" + variant, dtype), feedback),
                         codec + "_encode_with_residual",
                         {values(dtype, 1), values(feedback, 5), zeros(wire_bytes), zeros(8)},
                         [=, &kernels](const Addresses& at, Stream stream) {
                           kernels.encode_with_residual(option, dtype, at[0], Residual{at[1], at[1], feedback}, kNumel,
                                                        u8(at[2]), kRng, u64(at[3]), stream);
                         }});
      }
      if (dtype != DType::kF32) continue;
      cases.push_back({codec + "_decode_add" + variant,
                       codec + "_decode_add",
                       {wire, values(DType::kF32, 4)},
                       [=, &kernels](const Addresses& at, Stream stream) {
                         kernels.decode_add(option, u8(at[0]), kNumel, f32(at[1]), stream);
                       }});
      Bytes wires;  // of three ranks
      for (uint64_t seed : {1, 2, 3}) {
        Bytes of_rank = zeros(wire_bytes);
        kernels.encode(option, dtype, values(dtype, seed).data(), kNumel, of_rank.data(), kRng, nullptr, Stream{});
        wires.insert(wires.end(), of_rank.begin(), of_rank.end());
      }
      for (const bool has_residual : {false, true}) {
        cases.push_back({codec + "_reduce_encode" + variant + (has_residual ? " residual" : ""),
                         codec + "_reduce_encode",
                         {wires, values(DType::kF32, 5), zeros(wire_bytes), zeros(8)},
                         [=, &kernels](const Addresses& at, Stream stream) {
                           const Residual residual = has_residual ? Residual{at[1], at[1], DType::kF32} : Residual{};
                           kernels.reduce_encode(option, Contributions{u8(at[0]), wire_bytes, 3}, 1.0 / 3, residual,
                                                 kNumel, u8(at[2]), kRng, u64(at[3]), stream);
                         }});
      }
    }
  };
  for (const DType wire : {DType::kF16, DType::kBF16}) {
    add_codec("half", kHalf, static_cast<int>(wire), half_wire_bytes(kNumel, 0));
  }
  add_codec("centroid", kCentroid, 0, centroid_wire_bytes(kNumel));
  for (int type = 0; type < kNumMinifloats; ++type) {
    add_codec("minifloat", kMinifloat, type, minifloat_wire_bytes(kNumel, type));
  }
  add_codec("minmax_uint8", kMinmaxUint8, 0, minmax_uint8_wire_bytes(kNumel));
  add_codec("onebit", kOnebit, 0, onebit_wire_bytes(kNumel));
  for (const int bits : {8, 4, 2}) add_codec("qsgd", kQsgd, bits, qsgd_wire_bytes(kNumel, bits));
  for (const int k : {8, 256}) add_codec("topk", kTopk, k, topk_wire_bytes(kNumel, k));
  for (const int option :
       {TopkChunk{8, false}.option(), TopkChunk{64, true}.option(), TopkChunk{32, false, true}.option()}) {
    add_codec("topk_chunk", kTopkChunk, option, topk_chunk_wire_bytes(kNumel, option));
  }
  for (const DType from : kCodec) {
    cases.push_back({name("cast_add", from),
                     "cast_add",
                     {values(from, 1), values(DType::kF32, 2)},
                     [=](const Addresses& at, Stream stream) { cast_add(from, at[0], f32(at[1]), kNumel, stream); }});
  }
  return cases;
}

// The process's runtime while it lives.
class Registered {
 public:
  explicit Registered(EmulatedRuntime& runtime) { device::register_runtime(DeviceKind::kEmulated, &runtime); }
  ~Registered() { device::register_runtime(DeviceKind::kEmulated, nullptr); }
};

TEST_F(Emulated, EveryKernelHasTheCpusBits) {
  const Registered registered(runtime);
  runtime.set_delay(std::chrono::microseconds(5));
  const Stream stream = runtime.create_stream(kFirst);
  std::map<std::string, uint64_t> expected_launches;
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name);
    std::vector<Bytes> expected = c.buffers;
    Addresses on_cpu, on_device, pinned;
    for (Bytes& buffer : expected) on_cpu.push_back(buffer.data());
    c.launch(on_cpu, Stream{});
    bool has_changed = false;
    for (size_t i = 0; i < expected.size(); ++i) has_changed |= expected[i] != c.buffers[i];
    EXPECT_TRUE(has_changed);

    for (const Bytes& buffer : c.buffers) {
      pinned.push_back(runtime.allocate_pinned(buffer.size()));
      std::memcpy(pinned.back(), buffer.data(), buffer.size());
      on_device.push_back(runtime.allocate(buffer.size(), stream));
      runtime.copy_from_host(on_device.back(), pinned.back(), buffer.size(), stream);
    }
    c.launch(on_device, stream);
    ++expected_launches[c.kernel];
    for (size_t i = 0; i < expected.size(); ++i) {
      runtime.copy_to_host(pinned[i], on_device[i], expected[i].size(), stream);
    }
    runtime.synchronize(stream);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(std::memcmp(pinned[i], expected[i].data(), expected[i].size()), 0) << "buffer " << i;
      runtime.free(on_device[i], stream);
      runtime.free_pinned(pinned[i]);
    }
  }
  EXPECT_EQ(runtime.counters().launches, expected_launches);
  EXPECT_EQ(expected_launches.size(), 49u);  // the functions of backend.h
}

// copy() and fill_zero() of memory.h go to the registered runtime.
TEST_F(Emulated, MemoryOperationsAreEnqueuedOnTheStream) {
  device::register_runtime(DeviceKind::kEmulated, nullptr);  // that of other tests
  expect_error(ErrorKind::kInvalidArgument, "no runtime for emulated:0",
               [&] { device::fill_zero(&runtime, 1, kDefault); });
  const Registered registered(runtime);
  float* const a = floats(2, kDefault);
  float* const b = floats(2, kDefault);
  const auto closed = gate();
  hold(kDefault, closed);
  device::fill_zero(a, 8, kDefault);
  device::copy(b, a, 8, kDefault);
  device::copy(nullptr, nullptr, 0, kDefault);
  EXPECT_FALSE(runtime.is_idle(kDefault));
  open(closed);
  EXPECT_EQ(load(b + 1, kDefault), 0.0f);
}

}  // namespace
}  // namespace bagua

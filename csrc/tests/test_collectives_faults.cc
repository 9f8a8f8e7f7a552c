// Tests of ranks that disagree, do not come, or fail: errors that name both sides or the culprit, in
// time, and no touch of memory that has been given up (run under the address sanitizer).
#include <gtest/gtest.h>

#include <array>

#include "csrc/collectives/algorithms.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using namespace collectives;

constexpr std::chrono::milliseconds kShort = 80ms;  // a deadline that passes

// The errors of all ranks. Unless the failure is spread, ranks find out by themselves.
std::vector<std::exception_ptr> failures_of(int size, World::RankFunction function, std::chrono::milliseconds timeout,
                                            bool spread_failure = false) {
  WorldOptions options;
  options.operation_timeout = timeout;
  options.spread_failure = spread_failure;
  return World(size, std::move(function), options).run();
}

Error error_of(const std::exception_ptr& failure) {
  if (!failure) return Error(ErrorKind::kInternal, "the rank did not fail");
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorKind::kInternal, error.what());
  }
}

void expect_contains(const Error& error, const std::string& part) {
  EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
}

TEST(Mismatch, DifferentCollectivesAreReportedOnBothSidesNamingBoth) {
  const auto failures = failures_of(
      2,
      [](Context& context, int rank) {
        std::vector<float> data(1000);
        if (rank == 0) {
          perform(operation(OperationKind::kAllReduce, DType::kF32, data.size()),
                  [&] { all_reduce(context, data.data(), data.size(), DType::kF32, ReduceOp::kSum, nullptr); });
        } else {
          perform(operation(OperationKind::kBroadcast, DType::kF32, data.size(), ReduceOp::kSum, 0),
                  [&] { broadcast(context, data.data(), 4000, 0); });
        }
      },
      20s);
  for (size_t rank = 0; rank < 2; ++rank) {
    const Error error = error_of(failures[rank]);
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(error.rank(), static_cast<int>(1 - rank));
    expect_contains(error, "all_reduce #1 of 1000 float32 (SUM)");
    expect_contains(error, "broadcast #1 of 1000 float32 at rank 0");
  }
}

TEST(Mismatch, DifferentSizesAreReportedByEveryAlgorithm) {
  using Run = void (*)(Context&, void*, size_t, DType, ReduceOp);
  for (const Run run : {Run{recursive_doubling_all_reduce}, Run{ring_all_reduce}, Run{two_shot_all_reduce},
                        Run{direct_all_reduce}, Run{staged_all_reduce}}) {
    const auto failures = failures_of(
        3,
        [run](Context& context, int rank) {
          std::vector<float> data(rank == 1 ? 30001 : 30000);
          perform(operation(OperationKind::kAllReduce, DType::kF32, data.size()),
                  [&] { run(context, data.data(), data.size(), DType::kF32, ReduceOp::kSum); });
        },
        20s, true);
    bool names_both = false;
    for (const auto& failure : failures) {
      ASSERT_TRUE(failure);
      const std::string text = error_of(failure).what();
      names_both =
          names_both || (text.find("of 30000 ") != std::string::npos && text.find("of 30001 ") != std::string::npos);
    }
    EXPECT_TRUE(names_both);
  }
}

TEST(Mismatch, DifferentSplitsAreReportedWithBothSizes) {
  const auto failures = failures_of(
      2,
      [](Context& context, int rank) {
        uint8_t input[64], output[64];
        const std::vector<size_t> in = {8, 8}, out = rank == 0 ? std::vector<size_t>{8, 9} : in;
        perform(operation(OperationKind::kAllToAll), [&] { all_to_all(context, input, in, output, out); });
      },
      20s);
  expect_contains(error_of(failures[0]), "rank 1 sent 8 bytes where this rank expected 9");
}

TEST(Deadline, ARankThatNeverComesIsNamedInTime) {
  using Run = void (*)(Context&, void*, size_t, DType, ReduceOp);
  for (const Run run : {Run{recursive_doubling_all_reduce}, Run{ring_all_reduce}, Run{two_shot_all_reduce},
                        Run{direct_all_reduce}, Run{staged_all_reduce}}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto failures = failures_of(
        2,
        [run](Context& context, int rank) {
          if (rank == 1) return;
          std::vector<float> data(100000);
          perform(operation(OperationKind::kAllReduce, DType::kF32, data.size()),
                  [&] { run(context, data.data(), data.size(), DType::kF32, ReduceOp::kSum); });
        },
        kShort);
    const auto took = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(took, kShort);
    EXPECT_LT(took, 3s);
    EXPECT_FALSE(failures[1]);
    const Error error = error_of(failures[0]);
    EXPECT_EQ(error.kind(), ErrorKind::kDeadlineExceeded);
    EXPECT_EQ(error.rank(), 1);
    expect_contains(error, "rank 1");
    expect_contains(error, "all_reduce #1 of 100000 float32 (SUM)");
  }
}

TEST(Deadline, EveryCollectiveOfThreeRanksEndsWithoutTheThird) {
  const std::vector<std::function<void(Context&, uint8_t*)>> calls = {
      [](Context& c, uint8_t* d) { all_gather(c, d, d + 300000, 100000); },
      [](Context& c, uint8_t* d) { reduce_scatter(c, d, d + 300000, 100000, DType::kU8, ReduceOp::kMax); },
      [](Context& c, uint8_t* d) { broadcast(c, d, 300000, 2); },
      [](Context& c, uint8_t* d) { reduce(c, d, 300000, DType::kU8, ReduceOp::kMax, 2); },
      [](Context& c, uint8_t* d) { gather(c, d, d + 300000, 100000, 2); },
      [](Context& c, uint8_t* d) { scatter(c, d, d + 300000, 100000, 2); },
      [](Context& c, uint8_t* d) {
        all_to_all(c, d, {100000, 100000, 100000}, d + 300000, {100000, 100000, 100000});
      },
      [](Context& c, uint8_t*) { barrier(c); },
      [](Context& c, uint8_t* d) { all_reduce(c, d, 75000, DType::kF32, ReduceOp::kSum, &get_codec("minmax_uint8")); },
  };
  for (const auto& call : calls) {
    const auto begin = std::chrono::steady_clock::now();
    const auto failures = failures_of(
        3,
        [&](Context& context, int rank) {
          if (rank == 2) return;
          std::vector<uint8_t> memory(600000);
          perform(operation(OperationKind::kBarrier), [&] { call(context, memory.data()); });
        },
        kShort);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
    // A rank that waits for a victim is told so by the victim; at least one blames rank 2 itself.
    EXPECT_TRUE(error_of(failures[0]).rank() == 2 || error_of(failures[1]).rank() == 2);
    for (size_t rank = 0; rank < 2; ++rank) {
      const ErrorKind kind = error_of(failures[rank]).kind();
      EXPECT_TRUE(kind == ErrorKind::kDeadlineExceeded || kind == ErrorKind::kRemote)
          << error_of(failures[rank]).what();
    }
  }
}

// Rank 0 gives up and frees its buffers; what rank 1 posts afterwards must not reach them.
TEST(Cancel, MemoryIsNotTouchedAfterTheDeadline) {
  std::atomic<bool> has_given_up{false};
  const auto failures = failures_of(
      2,
      [&](Context& context, int rank) {
        if (rank == 0) {
          auto data = std::make_unique<std::array<float, 50000>>();
          try {
            perform(operation(OperationKind::kAllReduce, DType::kF32, data->size()),
                    [&] { ring_all_reduce(context, data->data(), data->size(), DType::kF32, ReduceOp::kSum); });
          } catch (...) {
            data.reset();
            has_given_up = true;
            throw;
          }
        } else {
          while (!has_given_up) std::this_thread::sleep_for(1ms);
          std::vector<float> data(50000, 1.0f);
          perform(operation(OperationKind::kAllReduce, DType::kF32, data.size()),
                  [&] { ring_all_reduce(context, data.data(), data.size(), DType::kF32, ReduceOp::kSum); });
        }
      },
      kShort);
  EXPECT_EQ(error_of(failures[0]).kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error_of(failures[1]).kind(), ErrorKind::kRemote);
  EXPECT_EQ(error_of(failures[1]).rank(), 0);
  expect_contains(error_of(failures[1]), "rank 0 failed");
}

TEST(Cancel, AFailureElsewhereEndsAWaitAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(run_world(4,
                         [](Context& context, int rank) {
                           if (rank == 3) throw std::logic_error("the test's own failure");
                           perform(operation(OperationKind::kBarrier), [&] { barrier(context); });
                         }),
               std::logic_error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

// A rank that has finished may destroy its communicator while others still talk to one another.
TEST(Leave, ARankThatLeavesAfterItsPartDisturbsNobody) {
  auto world = make_local_world(3, 50us);
  const auto run = [&](size_t r, int rounds) {
    Workspace workspace;
    EventLog events;
    Communicator& communicator = *world[r];
    if (r == 0) {
      world[0].reset();
      return;
    }
    for (int i = 0; i < rounds; ++i) {
      const int peer = r == 1 ? 2 : 1;
      int sent = i, received = -1;
      communicator.begin(operation(OperationKind::kPointToPoint), Deadline::after(20s));
      communicator.send_recv(peer, &sent, sizeof sent, peer, &received, sizeof received);
      communicator.end();
      ASSERT_EQ(received, i);
    }
  };
  std::vector<std::thread> threads;
  for (size_t r = 0; r < 3; ++r) threads.emplace_back(run, r, 200);
  for (std::thread& thread : threads) thread.join();

  world[1]->begin(operation(OperationKind::kPointToPoint), Deadline::after(20s));
  int value = 0;
  try {
    world[1]->recv(0, &value, sizeof value);
    FAIL() << "a message from a rank that has exited";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTransport);
    expect_contains(error, "rank 0 has exited");
  }
}

}  // namespace
}  // namespace bagua::testing

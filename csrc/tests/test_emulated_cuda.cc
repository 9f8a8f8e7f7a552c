// The emulation of CUDA itself: what it must notice is noticed, and what it computes is what CUDA's functions do.
#include <functional>
#include <stdexcept>

#include "csrc/tests/test_kernels_cuda.h"

namespace bagua {
namespace {

constexpr unsigned kThreads = 64;

class EmulatedCuda : public ::testing::Test {
 protected:
  void SetUp() override { BAGUA_SKIP_WITHOUT_FIBRES(); }

  static void expect_error(const std::function<void()>& thread, const std::string& part_of_message) {
    try {
      cuda_emulation::run_grid(1, kThreads, thread);
      FAIL() << "expected an error that mentions " << part_of_message;
    } catch (const std::logic_error& error) {
      EXPECT_NE(std::string(error.what()).find(part_of_message), std::string::npos) << error.what();
    }
  }
};

TEST_F(EmulatedCuda, ThreadsThatEndBeforeABarrierAreAnError) {
  expect_error(
      [] {
        if (threadIdx.x != 5) __syncthreads();
      },
      "thread 5 of block 0 has ended");
}

TEST_F(EmulatedCuda, BarriersAtTwoPlacesAreAnError) {
  expect_error(
      [] {
        if (threadIdx.x < 32) {
          __syncthreads();
        } else {
          __syncthreads();
        }
      },
      "thread 32 of block 0 waits for the block at");
}

TEST_F(EmulatedCuda, LanesThatDoNotComeAreAnError) {
  expect_error(
      [] {
        if (threadIdx.x % 32 < 31) __shfl_xor_sync(0xffffffffu, 1, 1);
      },
      "thread 0 of block 0 waits for its warp at");
  expect_error([] { __reduce_add_sync(0x0000ffffu, 1); }, "is not among the lanes that it names");
}

// A GPU fails where the host's processor does not.
TEST_F(EmulatedCuda, AVectorThatIsNotAlignedIsAnError) {
  alignas(16) static uint8_t bytes[32];
  expect_error([] { emulated_expect_aligned(bytes + 4 * (threadIdx.x == 3), 16); },
               "thread 3 of block 0 moves 16 bytes at an address that is 4 bytes past a multiple of that");
  cuda_emulation::run_grid(1, kThreads, [] { emulated_expect_aligned(bytes + 4 * (threadIdx.x % 8), 4); });
}

// An earlier mistake does not stay.
TEST_F(EmulatedCuda, RunsOnAfterAnError) {
  expect_error(
      [] {
        if (threadIdx.x == 0) __syncthreads();
      },
      "divergence");
  size_t num_threads = 0;
  cuda_emulation::run_grid(3, kThreads, [&] {
    __syncthreads();
    ++num_threads;
  });
  EXPECT_EQ(num_threads, 3 * kThreads);
}

TEST_F(EmulatedCuda, WarpFunctionsAreCudas) {
  std::vector<std::string> wrong;
  cuda_emulation::run_grid(1, kThreads, [&] {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int value = 100 * warp + lane;
    const auto expect = [&](bool holds, const char* what) {
      if (!holds) wrong.push_back(what + (" of thread " + std::to_string(threadIdx.x)));
    };
    expect(__shfl_xor_sync(0xffffffffu, value, 8) == 100 * warp + (lane ^ 8), "xor");
    expect(__shfl_up_sync(0xffffffffu, value, 4) == (lane < 4 ? value : value - 4), "up");
    expect(__shfl_down_sync(0xffffffffu, 0.5 * value, 4) == 0.5 * (lane > 27 ? value : value + 4), "down");
    expect(__shfl_sync(0xffffffffu, value, 9) == 100 * warp + 9, "of one lane");
    expect(__ballot_sync(0xffffffffu, lane == 3 || lane == 31) == 0x80000008u, "ballot");
    expect(__reduce_min_sync(0xffffffffu, -value) == -100 * warp - 31, "min");
    expect(__reduce_max_sync(0xffffffffu, value) == 100 * warp + 31, "max");
    expect(__reduce_add_sync(0xffffffffu, lane) == 496, "add");
    expect(__reduce_and_sync(0xffffffffu, lane == 7 ? 5u : 0xfcu) == 4u, "and");
    expect(__syncthreads_or(threadIdx.x == 63) != 0, "or of one");
    expect(__syncthreads_or(0) == 0, "or of none");
    if (lane >= 16) expect(__reduce_max_sync(0xffff0000u, lane) == 31, "max of half a warp");
  });
  EXPECT_EQ(wrong, std::vector<std::string>{});
}

// Every block begins with garbage, which all of its threads share.
TEST_F(EmulatedCuda, SharedMemoryBelongsToABlock) {
  cuda_emulation::run_grid(2, kThreads, [] {
    auto* shared = static_cast<uint32_t*>(emulated_shared_memory(4 * kThreads));
    EXPECT_EQ(shared[threadIdx.x], 0xa5a5a5a5u);
    __syncthreads();
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    EXPECT_EQ(shared[kThreads - 1 - threadIdx.x], kThreads - 1 - threadIdx.x);
  });
}

// Threads take turns in an order that no kernel may rely on.
TEST_F(EmulatedCuda, TheOrderOfThreadsChanges) {
  std::vector<std::vector<unsigned>> orders(3);
  cuda_emulation::run_grid(3, kThreads, [&] { orders[blockIdx.x].push_back(threadIdx.x); });
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(EmulatedCudaDeathTest, MemoryBehindArraysFaults) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const testing::GuardedArray array(32);
  EXPECT_DEATH(
      {
        volatile uint8_t byte = array.data()[32];
        static_cast<void>(byte);
      },
      "");
  EXPECT_DEATH(
      cuda_emulation::run_grid(1, 1, [] { static_cast<volatile uint8_t*>(emulated_shared_memory(64))[64] = 1; }), "");
}

}  // namespace
}  // namespace bagua

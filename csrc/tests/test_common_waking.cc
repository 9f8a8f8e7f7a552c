// Tests of what wakes a worker: the doorbell, and the reactor that rings it.
#include "csrc/common/reactor.h"
#include "csrc/common/shared_segments.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

// ---- doorbell

// Two sleepers hand a counter to and fro; a lost wake-up shows as a sleep that lasts until its limit.
TEST(Doorbell, NoRingIsLost) {
  constexpr uint32_t kTurns = 30'000;
  Doorbell doorbells[2]{Doorbell(), Doorbell(true)};  // one of this process alone
  std::atomic<uint32_t> turn{0};
  std::atomic<uint32_t> num_overslept{0};
  const auto play = [&](uint32_t player) {
    std::mt19937 rng(player);
    for (;;) {
      uint32_t now = turn.load(std::memory_order_acquire);
      if (now >= kTurns) break;
      if (now % 2 == player) {
        for (uint32_t i = rng() % 50; i > 0; --i) std::atomic_signal_fence(std::memory_order_seq_cst);
        turn.store(now + 1, std::memory_order_release);
        doorbells[1 - player].ring();
        continue;
      }
      const uint32_t epoch = doorbells[player].prepare();
      now = turn.load(std::memory_order_acquire);
      if (now % 2 == player || now >= kTurns) {
        doorbells[player].cancel();
        continue;
      }
      const auto begin = Clock::now();
      doorbells[player].sleep(epoch, 5s);
      if (Clock::now() - begin > 4s) ++num_overslept;
    }
  };
  run_together({[&] { play(0); }, [&] { play(1); }});
  EXPECT_EQ(num_overslept.load(), 0u);
}

TEST(Doorbell, ManyRingersAndAPeersMapping) {
  Doorbell doorbell;
  // The page as a peer maps it, at another address.
  auto* mapped = static_cast<DoorbellWords*>(map_shared(doorbell.fd(), 4096));
  std::atomic<uint32_t> work{0};
  constexpr uint32_t kWork = 3 * 5000;
  const auto ringer = [&](bool through_mapping) {
    for (int i = 0; i < 5000; ++i) {
      work.fetch_add(1, std::memory_order_release);
      if (through_mapping) {
        ring(*mapped);
      } else {
        doorbell.ring();
      }
    }
  };
  uint32_t overslept = 0;
  run_together({[&] { ringer(false); }, [&] { ringer(true); }, [&] { ringer(true); },
                [&] {
                  uint32_t seen = 0;
                  while (seen < kWork) {
                    const uint32_t epoch = doorbell.prepare();
                    if (work.load(std::memory_order_acquire) != seen) {
                      seen = work.load(std::memory_order_acquire);
                      doorbell.cancel();
                      continue;
                    }
                    const auto begin = Clock::now();
                    doorbell.sleep(epoch, 5s);
                    if (Clock::now() - begin > 4s) ++overslept;
                  }
                }});
  EXPECT_EQ(overslept, 0u);
  EXPECT_EQ(doorbell.words().sleepers.load(), 0u);
  unmap_shared(mapped, 4096);
}

TEST(Doorbell, SleepEndsAtItsLimit) {
  Doorbell doorbell;
  const auto begin = Clock::now();
  doorbell.sleep(doorbell.prepare(), 30ms);
  EXPECT_GE(Clock::now() - begin, 29ms);
  EXPECT_EQ(doorbell.words().sleepers.load(), 0u);
}

// ---- reactor

class Counter : public Reactor::Handler {
 public:
  explicit Counter(int fd) : fd_(fd) {}
  void on_ready() override {
    EXPECT_FALSE(is_removed.load());
    char buffer[64];
    while (read(fd_, buffer, sizeof buffer) > 0) {
    }
    ++count;
  }
  std::atomic<int> count{0};
  std::atomic<bool> is_removed{false};

 private:
  const int fd_;
};

TEST(Reactor, AfterRemoveAHandlerDoesNotRun) {
  auto reactor = Reactor::instance();
  EXPECT_EQ(reactor, Reactor::instance());
  for (int repetition = 0; repetition < 300; ++repetition) {
    const auto pair = unix_pair();
    Counter counter(pair[0]);
    const uint64_t id = reactor->add(pair[0], &counter);
    std::atomic<bool> stop{false};
    std::thread writer([&] {
      while (!stop) (void)!write(pair[1], "x", 1);
    });
    if (repetition % 3 == 0) std::this_thread::sleep_for(100us);
    reactor->remove(id);
    counter.is_removed = true;
    const int count = counter.count;
    stop = true;
    writer.join();
    EXPECT_EQ(counter.count.load(), count);
    reactor->remove(id);  // again is harmless
    ::close(pair[0]);
    ::close(pair[1]);
  }
}

TEST(Reactor, StopsWithItsLastUserAndStartsAgain) {
  for (int repetition = 0; repetition < 20; ++repetition) {
    const auto pair = unix_pair();
    auto reactor = Reactor::instance();
    Counter counter(pair[0]);
    const uint64_t id = reactor->add(pair[0], &counter);
    (void)!write(pair[1], "x", 1);
    EXPECT_TRUE(eventually([&] { return counter.count > 0; }));
    reactor->remove(id);
    reactor.reset();
    ::close(pair[0]);
    ::close(pair[1]);
  }
}

}  // namespace
}  // namespace bagua::testing

// The engine: order, inline runs, point-to-point operations under way, failures, and its end.
#include <future>
#include <set>

#include "csrc/engine/engine.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

using Engines = std::vector<std::unique_ptr<Engine>>;

Engines make_engines(int size, const Kind& kind) {
  Engines engines;
  for (auto& communicator : make_communicators(size, kind))
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  return engines;
}

Operation collective(uint64_t numel = 1) { return stamp(0, numel); }
Operation message() { return stamp(0, 1, OperationKind::kPointToPoint); }

void wait(const std::shared_ptr<Work>& work, Clock::duration limit = 30s) {
  ASSERT_TRUE(work->wait_for(limit)) << "an operation did not end";
}

std::optional<Error> error_of(const std::shared_ptr<Work>& work) {
  wait(work);
  EXPECT_TRUE(work->error()) << "the operation did not fail";
  return work->error();
}

// Sends one byte to the right and receives one from the left.
Engine::Run shift(std::vector<int>* log = nullptr, int id = 0) {
  return [log, id](Context& context) -> uint64_t {
    const GroupView& group = context.group;
    const int size = group.size(), right = (group.rank() + 1) % size, left = (group.rank() + size - 1) % size;
    const auto out = static_cast<uint8_t>(10 * id + group.rank());
    uint8_t in = 0;
    group.send_recv(right, &out, 1, left, &in, 1);
    EXPECT_EQ(in, static_cast<uint8_t>(10 * id + left));
    if (log != nullptr) log->push_back(id);
    return static_cast<uint64_t>(id);
  };
}

class EngineOver : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Transports, EngineOver, ::testing::Values(kShm, kTcp, kTorch, kLocal), kind_name);

TEST_P(EngineOver, OperationsRunInTheOrderOfTheirSubmission) {
  auto engines = make_engines(3, GetParam());
  std::vector<int> logs[3];
  std::vector<std::shared_ptr<Work>> works;
  for (int id = 0; id < 100; ++id) {
    for (size_t rank = 0; rank < 3; ++rank) {
      works.push_back(engines[rank]->submit(collective(), 1, 30s, shift(&logs[rank], id)));
    }
  }
  for (size_t i = works.size(); i-- > 0;) {
    wait(works[i]);
    EXPECT_FALSE(works[i]->error());
    EXPECT_EQ(works[i]->nonfinite_blocks(), i / 3);
    EXPECT_EQ(works[i]->bytes_sent(), 1u);
    EXPECT_EQ(works[i]->network_bytes_sent(),
              engines[i % 3]->communicator().shares_memory(static_cast<int>(i + 1) % 3) ? 0u : 1u);
  }
  for (const auto& log : logs) {
    ASSERT_EQ(log.size(), 100u);
    EXPECT_TRUE(std::is_sorted(log.begin(), log.end()));
  }
  std::set<uint64_t> tickets;
  for (size_t i = 0; i < works.size(); i += 3) tickets.insert(works[i]->ticket());
  EXPECT_EQ(tickets.size(), 100u);
  EXPECT_EQ(engines[0]->communicator().liveness().status().last_finished.sequence, 100u);
  EXPECT_GE(engines[0]->events().take(true).size(), 200u) << "queued and operation, for each";
  EXPECT_TRUE(engines[0]->events().take(false).empty());
}

TEST_P(EngineOver, BlockingCallsOfAnIdleEngineRunOnTheCallingThread) {
  auto engines = make_engines(2, GetParam());
  const auto call = [&](size_t rank) {
    for (int i = 0; i < 200; ++i) {
      std::thread::id ran_on;
      const auto work = engines[rank]->run_inline(collective(), 1, 30s, [&](Context& context) {
        ran_on = std::this_thread::get_id();
        return shift()(context);
      });
      EXPECT_TRUE(work->is_completed());
      EXPECT_EQ(ran_on, std::this_thread::get_id());
    }
  };
  run_together({[&] { call(0); }, [&] { call(1); }});
}

TEST_P(EngineOver, BlockingCallsKeepTheirPlaceBehindQueuedOnes) {
  auto engines = make_engines(2, GetParam());
  const auto call = [&](size_t rank) {
    std::vector<int> log;
    for (int round = 0; round < 50; ++round) {
      std::vector<std::shared_ptr<Work>> works;
      for (int i = 0; i < 3; ++i) works.push_back(engines[rank]->submit(collective(), 1, 30s, shift(&log, i)));
      works.push_back(engines[rank]->run_inline(collective(), 1, 30s, shift(&log, 3)));
      for (const auto& work : works) wait(work);
      EXPECT_EQ(log, (std::vector<int>{0, 1, 2, 3}));
      log.clear();
    }
  };
  run_together({[&] { call(0); }, [&] { call(1); }});
}

// One rank, many threads: whatever they do, one operation runs at a time.
TEST(Engine, ThreadsTakeTurns) {
  Engine engine(std::make_unique<Communicator>(0, 1, "alone", 20us));
  std::atomic<int> inside{0};
  std::atomic<int> num_run{0};
  std::set<uint32_t> sequences;  // guarded by the turns
  const Engine::Run run = [&](Context&) -> uint64_t {
    EXPECT_EQ(inside.fetch_add(1), 0);
    EXPECT_TRUE(sequences.insert(engine.communicator().operation().sequence).second);
    ++num_run;
    inside.fetch_sub(1);
    return 0;
  };
  const auto caller = [&](uint32_t seed) {
    std::mt19937 rng(seed);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 500; ++i) {
      works.push_back(rng() % 2 == 0 ? engine.submit(collective(), 0, 30s, run)
                                     : engine.run_inline(collective(), 0, 30s, run));
      if (rng() % 10 == 0) wait(works[rng() % works.size()]);
    }
    for (const auto& work : works) wait(work);
  };
  run_together({[&] { caller(1); }, [&] { caller(2); }, [&] { caller(3); }, [&] { caller(4); }});
  EXPECT_EQ(num_run.load(), 2000);
}

// ---- point to point

TEST_P(EngineOver, BothMaySendBeforeTheyReceive) {
  auto engines = make_engines(2, GetParam());
  const size_t bytes = 2'000'000;
  const auto swap = [&](size_t rank) {
    const Bytes out(bytes, static_cast<uint8_t>(rank + 1));
    Bytes in(bytes);
    const int peer = static_cast<int>(1 - rank);
    const auto sending = engines[rank]->submit_send(peer, out.data(), bytes, message(), 30s);
    const auto receiving = engines[rank]->submit_recv(peer, in.data(), bytes, message(), 30s);
    wait(sending);
    wait(receiving);
    EXPECT_FALSE(sending->error());
    EXPECT_EQ(in, Bytes(bytes, static_cast<uint8_t>(2 - rank)));
  };
  run_together({[&] { swap(0); }, [&] { swap(1); }});
}

TEST_P(EngineOver, MessagesKeepTheirOrderPerPeer) {
  auto engines = make_engines(3, GetParam());
  constexpr uint32_t kCount = 100;
  const auto all_to_all = [&](size_t rank) {
    std::vector<uint32_t> out(kCount), in[3];
    std::vector<std::shared_ptr<Work>> works;
    for (uint32_t i = 0; i < kCount; ++i) out[i] = i;
    for (auto& box : in) box.resize(kCount);
    for (uint32_t i = 0; i < kCount; ++i) {
      for (size_t peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        works.push_back(engines[rank]->submit_send(static_cast<int>(peer), &out[i], 4, message(), 30s));
        works.push_back(engines[rank]->submit_recv(static_cast<int>(peer), &in[peer][i], 4, message(), 30s));
      }
    }
    for (const auto& work : works) wait(work);
    for (size_t peer = 0; peer < 3; ++peer) {
      if (peer != rank) {
        EXPECT_EQ(in[peer], out);
      }
    }
  };
  run_together({[&] { all_to_all(0); }, [&] { all_to_all(1); }, [&] { all_to_all(2); }});
}

TEST(Engine, AMessageWhosePeerIsNotConnectedHoldsUpNoOther) {
  Communicators communicators;
  for (int rank = 0; rank < 3; ++rank) {
    communicators.push_back(std::make_unique<Communicator>(rank, 3, "test", 20us));
    communicators.back()->set_connector([](int) {});
  }
  connect_pair(*communicators[0], *communicators[2], kShm);
  Communicator& zero = *communicators[0];
  Communicator& one = *communicators[1];
  Engines engines;
  for (auto& communicator : communicators) engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  uint32_t out[] = {1, 2, 3}, in[] = {0, 0, 0}, other = 0;
  // To rank 1, which is not connected, and behind it to rank 2, which is.
  std::vector<std::shared_ptr<Work>> to_one;
  for (uint32_t& value : out) to_one.push_back(engines[0]->submit_send(1, &value, 4, message(), 30s));
  const auto to_two = engines[0]->submit_send(2, &out[0], 4, message(), 30s);
  const auto at_two = engines[2]->submit_recv(0, &other, 4, message(), 30s);
  wait(to_two);
  wait(at_two);
  EXPECT_EQ(other, 1u);
  EXPECT_FALSE(to_one[0]->is_completed());
  connect_pair(zero, one, kShm);
  std::vector<std::shared_ptr<Work>> at_one;
  for (uint32_t& value : in) at_one.push_back(engines[1]->submit_recv(0, &value, 4, message(), 30s));
  for (const auto& work : at_one) wait(work);
  for (const auto& work : to_one) wait(work);
  EXPECT_EQ(in[0], 1u);
  EXPECT_EQ(in[1], 2u);
  EXPECT_EQ(in[2], 3u);
}

TEST(Engine, AMessageWhosePeerNeverConnectsEndsAtItsDeadline) {
  auto communicator = std::make_unique<Communicator>(0, 2, "test", 20us);
  communicator->set_connector([&connecting = *communicator](int peer) {
    connecting.liveness().note_unreachable(peer, "rank " + std::to_string(peer) + " has not come", true);
  });
  Engine engine(std::move(communicator));
  uint32_t value = 0;
  const auto begin = Clock::now();
  const auto first = engine.submit_recv(1, &value, 4, message(), 100ms);
  const auto second = engine.submit_recv(1, &value, 4, message(), 30s);
  const auto error = error_of(first);
  ASSERT_TRUE(error);
  EXPECT_CONTAINS(std::string(error->what()), "did not end within 0.1 s: rank 1 has not come");
  EXPECT_EQ(std::string(error_of(second)->what()), std::string(error->what()));
  EXPECT_GE(Clock::now() - begin, 100ms);
  EXPECT_LT(Clock::now() - begin, 5s);
}

TEST(Engine, APeerThatOthersAskAboutIsDialedWhileNothingRuns) {
  auto communicator = std::make_unique<Communicator>(0, 3, "test", 20us);
  std::atomic<int> dialed{-1};
  communicator->set_connector([&](int peer) { dialed = peer; });
  Engine engine(std::move(communicator));
  std::this_thread::sleep_for(20ms);  // it sleeps
  const auto begin = Clock::now();
  engine.communicator().liveness().hearing_of(2);
  EXPECT_TRUE(eventually([&] { return dialed == 2; }));
  EXPECT_LT(Clock::now() - begin, 250ms) << "half of what it sleeps";
}

TEST_P(EngineOver, AMessageThatIsNotAnsweredEndsAtItsDeadline) {
  auto engines = make_engines(2, GetParam());
  uint32_t value = 0;
  const auto error = error_of(engines[0]->submit_recv(1, &value, 4, message(), 100ms));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_EQ(error->operation(), "send/recv");
}

// ---- failures

TEST_P(EngineOver, TheFirstFailureIsTheCauseOfAllThatFollow) {
  auto engines = make_engines(2, GetParam());
  const auto failing = engines[0]->submit(collective(), 1, 30s, [](Context&) -> uint64_t {
    throw Error(ErrorKind::kInvalidArgument, "no such thing", 0, "all_reduce");
  });
  const auto queued = engines[0]->submit(collective(), 1, 30s, shift());
  const auto inline_ = engines[0]->run_inline(collective(), 1, 30s, shift());
  uint32_t value = 0;
  const auto receiving = engines[0]->submit_recv(1, &value, 4, message(), 30s);
  for (const auto& work : {failing, queued, inline_, receiving}) {
    const auto error = error_of(work);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(std::string(error->what()), "no such thing");
  }
  if (!GetParam().has_control()) return;
  const auto remote = error_of(engines[1]->run_inline(collective(), 1, 30s, shift()));
  ASSERT_TRUE(remote);
  EXPECT_EQ(remote->kind(), ErrorKind::kRemote);
  EXPECT_EQ(remote->rank(), 0);
}

TEST_P(EngineOver, MessagesUnderWayFailWithTheCause) {
  auto engines = make_engines(2, GetParam());
  uint32_t values[3] = {};
  std::vector<std::shared_ptr<Work>> works;
  for (uint32_t& value : values) works.push_back(engines[0]->submit_recv(1, &value, 4, message(), 30s));
  std::this_thread::sleep_for(20ms);
  engines[0]->communicator().liveness().poison(Error(ErrorKind::kAborted, "enough"));
  for (const auto& work : works) EXPECT_EQ(std::string(error_of(work)->what()), "enough");
}

TEST(Engine, WhatIsNoErrorOfOursIsAnInternalOne) {
  Engine engine(std::make_unique<Communicator>(0, 1, "alone", 20us));
  const auto error =
      error_of(engine.submit(collective(), 0, 30s, [](Context&) -> uint64_t { throw std::out_of_range("9 of 3"); }));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kInternal);
  EXPECT_CONTAINS(std::string(error->what()), "unexpected failure in the core: 9 of 3");
}

TEST_P(EngineOver, AnInterruptEndsAnInlineOperation) {
  auto engines = make_engines(2, GetParam());
  const auto begin = Clock::now();
  const auto work =
      engines[0]->run_inline(collective(), 1, 30s, shift(), [] { throw Error(ErrorKind::kAborted, "interrupted", 0); });
  EXPECT_TRUE(work->is_completed());
  EXPECT_EQ(std::string(error_of(work)->what()), "interrupted");
  EXPECT_LT(Clock::now() - begin, 5s);
}

// ---- the end

TEST_P(EngineOver, CloseWithNothingPendingDisturbsNobody) {
  for (int repetition = 0; repetition < 30; ++repetition) {
    auto engines = make_engines(2, GetParam());
    const auto use_and_close = [&](size_t rank) {
      const int peer = static_cast<int>(1 - rank);
      uint32_t out = 1, in = 0;
      const auto sending = engines[rank]->submit_send(peer, &out, 4, message(), 30s);
      const auto receiving = engines[rank]->submit_recv(peer, &in, 4, message(), 30s);
      const auto collective_work = engines[rank]->submit(collective(), 1, 30s, shift());
      wait(sending);
      wait(receiving);
      wait(collective_work);
      EXPECT_FALSE(sending->error() || receiving->error() || collective_work->error());
      engines[rank]->close();  // at once, while the worker has hardly put the last operation away
    };
    run_together({[&] { use_and_close(0); }, [&] { use_and_close(1); }});
    for (const auto& engine : engines) EXPECT_FALSE(engine->communicator().liveness().is_poisoned());
  }
}

TEST_P(EngineOver, CloseFailsWhatIsPending) {
  auto engines = make_engines(2, GetParam());
  uint32_t value = 0;
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 3; ++i) works.push_back(engines[0]->submit(collective(), 1, 30s, shift()));
  works.push_back(engines[0]->submit_recv(1, &value, 4, message(), 30s));
  const auto begin = Clock::now();
  engines[0]->close();
  EXPECT_LT(Clock::now() - begin, 5s);
  for (const auto& work : works) {
    ASSERT_TRUE(work->is_completed());
    EXPECT_EQ(work->error()->kind(), ErrorKind::kAborted);
    EXPECT_CONTAINS(std::string(work->error()->what()),
                    "rank 0 destroyed the group 'test' with 4 operations pending; wait for them first");
  }
  if (!GetParam().has_control()) return;
  // Rank 0 may have sent its part of the first one, which then ends well.
  const auto first = engines[1]->run_inline(collective(), 1, 30s, shift());
  wait(first);
  auto remote = first->error();
  if (!remote) remote = error_of(engines[1]->run_inline(collective(), 1, 30s, shift()));
  ASSERT_TRUE(remote);
  EXPECT_EQ(remote->rank(), 0);
}

TEST_P(EngineOver, CloseFailsMessagesUnderWay) {
  auto engines = make_engines(2, GetParam());
  uint32_t value = 0;
  const auto work = engines[0]->submit_recv(1, &value, 4, message(), 30s);
  std::this_thread::sleep_for(20ms);
  engines[0]->close();
  EXPECT_EQ(error_of(work)->kind(), ErrorKind::kAborted);
}

TEST_P(EngineOver, CloseMayBeCalledByAnybodyAndAgain) {
  auto engines = make_engines(2, GetParam());
  std::shared_ptr<Work> running = engines[0]->submit(collective(), 1, 30s, shift());
  run_together({[&] { engines[0]->close(); }, [&] { engines[0]->close(); }, [&] { engines[1]->close(); }});
  engines[0]->close();
  EXPECT_TRUE(running->is_completed());
}

TEST_P(EngineOver, CloseWaitsForAnInlineOperationOfAnotherThread) {
  auto engines = make_engines(2, GetParam());
  std::shared_ptr<Work> work;
  run_together({[&] { work = engines[0]->run_inline(collective(), 1, 30s, shift()); },
                [&] {
                  std::this_thread::sleep_for(50ms);
                  engines[0]->close();
                }});
  EXPECT_EQ(error_of(work)->kind(), ErrorKind::kAborted);
}

TEST_P(EngineOver, WhatComesAfterTheEndFailsAtOnce) {
  auto engines = make_engines(2, GetParam());
  for (auto& engine : engines) engine->close();
  uint8_t byte = 0;
  for (const auto& work :
       {engines[0]->submit(collective(), 1, 30s, shift()), engines[0]->run_inline(collective(), 1, 30s, shift()),
        engines[0]->submit_send(1, &byte, 1, message(), 30s), engines[0]->submit_recv(1, &byte, 1, message(), 30s)}) {
    EXPECT_TRUE(work->is_completed());
    EXPECT_EQ(error_of(work)->kind(), ErrorKind::kAborted);
  }
}

TEST(Work, WaitersOfAllThreadsWakeUp) {
  for (int repetition = 0; repetition < 100; ++repetition) {
    Work work(1);
    EXPECT_FALSE(work.wait_for(0ns));
    run_together({[&] { EXPECT_TRUE(work.wait_for(10s)); }, [&] { EXPECT_TRUE(work.wait_for(10s)); },
                  [&] { work.complete(5); }});
    EXPECT_EQ(work.nonfinite_blocks(), 5u);
    EXPECT_FALSE(work.error());
  }
}

}  // namespace
}  // namespace bagua::testing

// Tests of what a waiting rank is told: peers that leave or die, deadlines with the culprit's name, first
// causes of others, interrupts.
#include <future>
#include <set>

#include "csrc/tests/test_control_frames.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

class Faults : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Transports, Faults, ::testing::Values(kShm, kTcp, kTorch), kind_name);

// Over torch a message of a collective leaves when its receiver asks for it.
class BufferedFaults : public Faults {};

INSTANTIATE_TEST_SUITE_P(Transports, BufferedFaults, ::testing::Values(kShm, kTcp), kind_name);

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Returns what rank `rank` is told when it receives from `peer` within `timeout`.
std::optional<Error> error_of_recv(Communicator& communicator, int peer, Clock::duration timeout,
                                   uint32_t sequence = 1) {
  return error_of([&] {
    uint8_t byte;
    communicator.begin(stamp(sequence), Deadline::after(timeout));
    communicator.recv(peer, &byte, 1);
  });
}

TEST_P(Faults, APeerThatLeavesIsNamedAtOnce) {
  auto communicators = make_communicators(2, GetParam());
  std::thread leaver([&] {
    std::this_thread::sleep_for(50ms);
    communicators[1]->close();
  });
  const auto begin = Clock::now();
  const auto error = error_of_recv(*communicators[0], 1, 30s);
  leaver.join();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTransport);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 left the group 'test' while this rank waits for it in all_reduce #1");
  EXPECT_LT(seconds_since(begin), 5);
}

TEST_P(Faults, ADeadPeerIsNamedAtOnce) {
  auto communicators = make_communicators(2, GetParam());
  std::thread killer([&] {
    std::this_thread::sleep_for(50ms);
    communicators[1].reset();  // its sockets close, and it has not left the group
  });
  const auto begin = Clock::now();
  const auto error = error_of_recv(*communicators[0], 1, 30s);
  killer.join();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTransport);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 closed its connection without leaving the group: its process died");
  EXPECT_LT(seconds_since(begin), 5);
}

TEST_P(Faults, RanksThatAreLeftNameTheSameDead) {
  for (int round = 0; round < 10; ++round) {
    auto communicators = make_communicators(5, GetParam());
    std::optional<Error> errors[3];
    std::atomic<int> num_ready{0};
    run_together({[&] {
                    while (num_ready < 3) std::this_thread::yield();
                    std::this_thread::sleep_for(5ms);
                    communicators[static_cast<size_t>(round % 2 == 0 ? 4 : 3)].reset();
                  },
                  [&] {
                    while (num_ready < 3) std::this_thread::yield();
                    std::this_thread::sleep_for(5ms);
                    communicators[static_cast<size_t>(round % 2 == 0 ? 3 : 4)].reset();
                  },
                  [&] {  // each of them waits for another one
                    ++num_ready;
                    errors[0] = error_of_recv(*communicators[0], 3, 30s);
                  },
                  [&] {
                    ++num_ready;
                    errors[1] = error_of_recv(*communicators[1], 4, 30s);
                  },
                  [&] {
                    ++num_ready;
                    errors[2] = error_of_recv(*communicators[2], 0, 30s);
                  }});
    // One of the two may still have told that it has lost the other one, and is not counted then: by no rank.
    ASSERT_TRUE(errors[0] && errors[1] && errors[2]);
    const std::vector<int> dead = errors[0]->ranks();
    EXPECT_TRUE(dead == std::vector<int>{3} || dead == std::vector<int>{4} || dead == (std::vector<int>{3, 4}));
    for (const auto& error : errors) {
      EXPECT_EQ(error->ranks(), dead) << error->what();
      EXPECT_EQ(error->rank(), dead.front()) << error->what();
      EXPECT_CONTAINS(std::string(error->what()), "rank " + std::to_string(dead.front()));
    }
  }
}

TEST_P(Faults, ARankThatTellsItsFailureIsNotDead) {
  auto communicators = make_communicators(3, GetParam());
  communicators[2]->liveness().poison(Error(ErrorKind::kInvalidArgument, "the third is ill"));
  const auto error = error_of_recv(*communicators[0], 2, 30s);
  communicators[2].reset();
  const auto later = error_of_recv(*communicators[1], 2, 30s);
  for (const auto& told : {error, later}) {
    ASSERT_TRUE(told);
    EXPECT_EQ(told->ranks(), std::vector<int>{2});
    EXPECT_CONTAINS(std::string(told->what()), "the third is ill");
  }
}

TEST_P(BufferedFaults, WhatALeavingPeerSentBeforeStillArrives) {
  auto communicators = make_communicators(2, GetParam());
  const size_t bytes = 600'000;  // fits into the ring and into the sockets' buffers
  std::mt19937 rng(5);
  const Bytes out = random_bytes(rng, bytes);
  communicators[1]->begin(stamp(1), Deadline::after(30s));
  communicators[1]->send(0, out.data(), bytes);
  communicators[1]->end();
  communicators[1]->close();
  std::this_thread::sleep_for(350ms);  // longer than a departure's grace
  Bytes in(bytes);
  communicators[0]->begin(stamp(1), Deadline::after(30s));
  communicators[0]->recv(1, in.data(), bytes);
  communicators[0]->end();
  EXPECT_TRUE(in == out);
}

// ---- deadlines

// Over tcp the cause travels on a connection of its own and may overtake the message.
TEST(FaultsOfOneEnd, WhatAFailedPeerSentBeforeStillCounts) {
  auto communicators = make_communicators(2, kShm);
  const uint8_t out = 42;
  uint8_t in = 0;
  communicators[0]->begin(stamp(1), Deadline::after(30s));
  communicators[1]->begin(stamp(1), Deadline::after(30s));
  communicators[1]->send(0, &out, 1);
  communicators[1]->end();
  communicators[1]->liveness().poison(Error(ErrorKind::kAborted, "failed after it had sent", 1));
  while (!communicators[0]->liveness().is_poisoned()) std::this_thread::sleep_for(1ms);
  communicators[0]->recv(1, &in, 1);
  communicators[0]->end();
  EXPECT_EQ(in, out);
  EXPECT_CONTAINS(std::string(error_of_recv(*communicators[0], 1, 30s, 2)->what()), "failed after it had sent");
}

TEST_P(Faults, ALatePeerIsNamedWithWhatItDidLast) {
  auto communicators = make_communicators(2, GetParam());
  const auto first = error_of_recv(*communicators[0], 1, 50ms);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(first->rank(), 1);
  EXPECT_CONTAINS(std::string(first->what()),
                  "all_reduce #1 of 1 uint8 (SUM) of group 'test' did not end within 0.05 s: rank 1 has not called it; "
                  "it has finished none before, and it is not in a collective now");
  communicators[1]->begin(stamp(8, 99, OperationKind::kBroadcast), Deadline::after(1s));
  communicators[1]->end();
  const auto second = error_of_recv(*communicators[0], 1, 50ms);
  ASSERT_TRUE(second);
  EXPECT_CONTAINS(std::string(second->what()), "its last was broadcast #8 of 99 uint8");
}

TEST_P(Faults, APeerInAnotherOperationIsNamedWithIt) {
  auto communicators = make_communicators(2, GetParam());
  communicators[1]->begin(stamp(3, 5, OperationKind::kAllGather), Deadline::after(1s));
  const auto error = error_of_recv(*communicators[0], 1, 50ms);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()), "rank 1 is in all_gather #3 of 5 uint8");
}

// Runs a wait, and says when it has ended, however it ended.
template <typename Wait>
void wait_and_say(std::promise<void>& ended, Wait wait) {
  try {
    wait();
  } catch (...) {
    ended.set_value();
    throw;
  }
  ended.set_value();
}

TEST_P(Faults, TheEndOfAChainIsNamed) {
  auto communicators = make_communicators(3, GetParam());
  std::promise<void> ended;
  // 0 waits for 1, which waits for 2, which does nothing. Rank 1's deadline is the later one.
  const auto wait_for_next = [&](size_t rank, Clock::duration timeout) {
    uint8_t byte;
    communicators[rank]->begin(stamp(1), Deadline::after(timeout));
    communicators[rank]->recv(static_cast<int>(rank) + 1, &byte, 1);
  };
  const auto failures =
      run_threads({[&] { wait_and_say(ended, [&] { wait_for_next(0, 80ms); }); }, [&] { wait_for_next(1, 30s); },
                   [&] {
                     ended.get_future().wait();
                     communicators[1]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                   }});
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error->rank(), 2);
  EXPECT_CONTAINS(std::string(error->what()), "rank 1 waits for rank 2");
}

// Each is one operation ahead of the next one, and only rank 0 has a deadline that passes.
TEST_P(Faults, TheEndOfAChainThroughOtherOperationsIsNamed) {
  auto communicators = make_communicators(4, GetParam());
  std::promise<void> ended;
  const auto wait_for_next = [&](size_t rank, Clock::duration timeout) {
    uint8_t byte;
    communicators[rank]->begin(stamp(static_cast<uint32_t>(3 - rank)), Deadline::after(timeout));
    communicators[rank]->recv(static_cast<int>(rank) + 1, &byte, 1);
  };
  const auto failures =
      run_threads({[&] { wait_and_say(ended, [&] { wait_for_next(0, 80ms); }); }, [&] { wait_for_next(1, 30s); },
                   [&] { wait_for_next(2, 30s); },
                   [&] {
                     ended.get_future().wait();
                     communicators[1]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                     communicators[2]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                   }});
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error->rank(), 3);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 waits for rank 2, and in the end for rank 3; rank 3 has not called it");
}

// Two ranks that have other numbers in the job, and processes with more groups.
Communicators pair_of(const Kind& kind, std::array<int, 2> job_ranks,
                      std::array<std::shared_ptr<Process>, 2> processes) {
  Communicators communicators;
  for (int rank = 0; rank < 2; ++rank) {
    communicators.push_back(std::make_unique<Communicator>(rank, 2, "test", 20us));
    communicators.back()->liveness().join_process(processes[static_cast<size_t>(rank)], {job_ranks[0], job_ranks[1]},
                                                  "test");
  }
  connect_pair(*communicators[0], *communicators[1], kind);
  return communicators;
}

// Rank 1 has not called what rank 0 waits in: its program stands still in another group, where rank 1 of that group,
// 2 of the job, does nothing.
TEST_P(Faults, TheEndOfAChainThroughAnotherGroupIsNamed) {
  const auto process = std::make_shared<Process>();
  const auto communicators = pair_of(GetParam(), {0, 1}, {nullptr, process});
  const auto others = pair_of(GetParam(), {1, 2}, {process, nullptr});
  others[0]->liveness().set_num_waiters(std::make_shared<std::atomic<int>>(1));
  std::promise<void> ended;
  const auto failures = run_threads({[&] {
                                       wait_and_say(ended, [&] {
                                         uint8_t byte;
                                         std::this_thread::sleep_for(100ms);  // the other wait has lasted longer
                                         communicators[0]->begin(stamp(1), Deadline::after(80ms));
                                         communicators[0]->recv(1, &byte, 1);
                                       });
                                     },
                                     [&] {
                                       uint8_t byte;
                                       others[0]->begin(stamp(1), Deadline::after(30s));
                                       others[0]->recv(1, &byte, 1);
                                     },
                                     [&] {
                                       ended.get_future().wait();
                                       others[0]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                                     }});
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_CONTAINS(
      std::string(error->what()),
      "rank 1 has not called it: it waits in another group for rank 2 of the job; rank 2 of the job has not called it");
}

// Rank 1 waits for rank 0 in turn, in another group.
TEST_P(Faults, ARankThatStandsInAnotherGroupIsNamedWithIt) {
  const auto process = std::make_shared<Process>();
  const auto communicators = pair_of(GetParam(), {0, 1}, {nullptr, process});
  const auto others = pair_of(GetParam(), {1, 0}, {process, nullptr});
  others[0]->liveness().set_num_waiters(std::make_shared<std::atomic<int>>(1));
  std::promise<void> ended;
  const auto failures = run_threads({[&] {
                                       wait_and_say(ended, [&] {
                                         uint8_t byte;
                                         while (!process->longest_except(nullptr)) std::this_thread::yield();
                                         communicators[0]->begin(stamp(1), Deadline::after(80ms));
                                         communicators[0]->recv(1, &byte, 1);
                                       });
                                     },
                                     [&] {
                                       uint8_t byte;
                                       others[0]->begin(stamp(3), Deadline::after(30s));
                                       others[0]->recv(1, &byte, 1);
                                     },
                                     [&] {
                                       ended.get_future().wait();
                                       others[0]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                                     }});
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 has not called it; it has finished none before, and it is in all_reduce #3 of 1 uint8 (SUM) "
                  "of group 'test' now");
}

TEST_P(Faults, WhoLeavesForAFailureElsewhereSaysSo) {
  const auto process = std::make_shared<Process>();
  const auto communicators = pair_of(GetParam(), {2, 1}, {nullptr, process});
  Communicator failed(0, 2, "elsewhere", 20us);
  failed.liveness().join_process(process, {1, 2}, "elsewhere");
  failed.liveness().poison(Error(ErrorKind::kDeadlineExceeded, "rank 1 does not answer", 1));
  communicators[1]->close();
  const auto error = error_of_recv(*communicators[0], 1, 30s);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 0);  // 2 of the job
  EXPECT_CONTAINS(std::string(error->what()), "rank 1 left the group 'test' while this rank waits for it");
  EXPECT_CONTAINS(std::string(error->what()), "before, in group 'elsewhere': rank 1 does not answer");
}

TEST_P(Faults, TheCauseThatTheNextInTheChainFindsWins) {
  auto communicators = make_communicators(3, GetParam());
  const auto wait_and_tell = [&](size_t rank, int peer, Clock::duration timeout) {
    uint8_t byte;
    try {
      communicators[rank]->begin(stamp(1), Deadline::after(timeout));
      communicators[rank]->recv(peer, &byte, 1);
    } catch (const Error& error) {
      communicators[rank]->liveness().poison(error);
      throw;
    }
  };
  const auto failures = run_threads({[&] { wait_and_tell(0, 1, 150ms); }, [&] { wait_and_tell(1, 2, 150ms); }});
  for (const auto& failure : failures) {
    const auto error = error_of(failure);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->rank(), 2);
    EXPECT_CONTAINS(std::string(error->what()), "rank 2 has not called it; it has finished none before");
  }
}

TEST(FaultsOfOneEnd, APeerThatDoesNotAnswerIsStopped) {
  Communicator communicator(0, 2, "test", 20us);
  const auto control = unix_pair();
  const Descriptor rings = create_sealed("test-rings", ShmChannel::segment_bytes(4096));
  const auto process_link = std::make_shared<ProcessLink>(Descriptor(control[0]), ProcessLink::Pace(10s));
  auto link = std::make_shared<ControlLink>(process_link, "test", 1);
  communicator.attach(
      1, std::make_unique<ShmChannel>(1, dup(rings.get()), 4096, true, dup(communicator.doorbell().fd()), link), link);
  process_link->start();
  const auto begin = Clock::now();
  const auto error = error_of_recv(communicator, 1, 100ms);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 does not answer: its process is stopped or its host is unreachable");
  EXPECT_LT(seconds_since(begin), 3);
  ::close(control[1]);
}

TEST(FaultsOfOneEnd, WhoWaitsForAConnectionIsNamedByOthersAsWaiting) {
  Communicator communicator(0, 3, "test", 20us);
  std::atomic<int> num_wanted{0};
  communicator.set_connector([&](int peer) {
    EXPECT_EQ(peer, 2);
    ++num_wanted;
  });
  EXPECT_TRUE(communicator.awaits_channel(2));
  EXPECT_TRUE(communicator.awaits_channel(2));
  std::thread looker([&] {
    EXPECT_TRUE(eventually([&] { return communicator.liveness().status().waiting_for == 2; }));
    EXPECT_EQ(communicator.liveness().status().operation, stamp(4));
    communicator.liveness().poison(Error(ErrorKind::kAborted, "the end of the test", 1));
  });
  const auto error = error_of_recv(communicator, 2, 30s, 4);
  looker.join();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_EQ(num_wanted, 1);
}

TEST(FaultsOfOneEnd, AtTheDeadlineItIsKnownHowFarTheConnectionHasCome) {
  for (const bool names_peer : {false, true}) {
    Communicator communicator(0, 3, "test", 20us);
    communicator.set_connector(
        [&](int peer) { communicator.liveness().note_unreachable(peer, "the cable is cut", names_peer); });
    const auto error = error_of_recv(communicator, 2, 20ms, 4);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
    EXPECT_EQ(error->rank(), names_peer ? 2 : -1);
    EXPECT_CONTAINS(std::string(error->what()), "did not end within 0.02 s: the cable is cut");
  }
}

std::string why_late(PeerStatus::Group group) {
  Communicator communicator(0, 2, "test", 20us);
  Process process;
  const auto error = error_of([&] {
    communicator.begin(stamp(1), Deadline::after(0ms));
    communicator.liveness().blame(1, 0.05, [&] { communicator.liveness().take_answer(1, process.status(group)); });
  });
  EXPECT_TRUE(error && error->rank() == 1);
  return error->what();
}

TEST(FaultsOfOneEnd, WhoDoesNotHaveTheGroupIsNamedWithIt) {
  EXPECT_CONTAINS(why_late(PeerStatus::kHasNotMade),
                  ": rank 1 has not made the group 'test'; all ranks call new_group");
  EXPECT_CONTAINS(why_late(PeerStatus::kHasLeft), ": rank 1 has destroyed the group 'test'; destroy a group only when");
}

TEST(FaultsOfOneEnd, AChainEndsWithWhoHasDestroyedTheGroup) {
  Communicators communicators;
  for (int rank = 0; rank < 2; ++rank) communicators.push_back(std::make_unique<Communicator>(rank, 3, "test", 20us));
  connect_pair(*communicators[0], *communicators[1], kShm);
  Process process;
  communicators[1]->set_connector([&](int) {});
  std::atomic<bool> is_over{false};
  std::thread answering([&] {
    for (; !is_over; std::this_thread::sleep_for(1ms)) {
      communicators[1]->liveness().take_answer(2, process.status(PeerStatus::kHasLeft));
    }
  });
  std::promise<void> ended;
  const auto failures =
      run_threads({[&] {
                     wait_and_say(ended, [&] {
                       uint8_t byte;
                       communicators[0]->begin(stamp(1), Deadline::after(80ms));
                       communicators[0]->recv(1, &byte, 1);
                     });
                   },
                   [&] {
                     uint8_t byte;
                     communicators[1]->begin(stamp(1), Deadline::after(30s));
                     communicators[1]->recv(2, &byte, 1);
                   },
                   [&] {
                     ended.get_future().wait();
                     communicators[1]->liveness().poison(Error(ErrorKind::kAborted, "the end of the test"));
                   }});
  is_over = true;
  answering.join();
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 2);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 waits for rank 2; rank 2 has destroyed the group in which rank 1 waits for it");
}

TEST(FaultsOfOneEnd, ALongNameOfAGroupIsCut) {
  PeerStatus status;
  Process::Wait wait;
  wait.group = std::string(100, 'g');
  wait.write_to(status);
  EXPECT_EQ(std::string(status.elsewhere_group.data()), std::string(63, 'g'));
}

// ---- first causes

TEST_P(Faults, TheFirstCauseReachesEverybodyAndStays) {
  auto communicators = make_communicators(3, GetParam());
  std::thread poisoner([&] {
    std::this_thread::sleep_for(50ms);
    communicators[2]->liveness().poison(Error(ErrorKind::kInvalidArgument, "bucket 3 holds a NaN", 2, "all_reduce"));
    communicators[2]->liveness().poison(Error(ErrorKind::kInternal, "a consequence"));
  });
  const auto begin = Clock::now();
  const auto failures = run_threads({[&] {
                                       uint8_t byte;
                                       communicators[0]->begin(stamp(1), Deadline::after(30s));
                                       communicators[0]->recv(1, &byte, 1);
                                     },
                                     [&] {
                                       uint8_t byte;
                                       communicators[1]->begin(stamp(1), Deadline::after(30s));
                                       communicators[1]->recv(0, &byte, 1);
                                     }});
  poisoner.join();
  EXPECT_LT(seconds_since(begin), 5);
  for (const auto& failure : failures) {
    const auto error = error_of(failure);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kRemote);
    EXPECT_EQ(error->rank(), 2);
    EXPECT_EQ(error->operation(), "all_reduce");
    EXPECT_EQ(std::string(error->what()), "rank 2 reported: bucket 3 holds a NaN");
  }
  for (auto& communicator : communicators) {
    const auto again = error_of([&] { communicator->begin(stamp(2), Deadline::after(1s)); });
    ASSERT_TRUE(again);
    EXPECT_CONTAINS(std::string(again->what()), "bucket 3 holds a NaN");
  }
}

TEST_P(Faults, ACauseTravelsOverRanksThatAreConnectedOnlyByOthers) {
  Communicators communicators;
  for (int rank = 0; rank < 4; ++rank) communicators.push_back(std::make_unique<Communicator>(rank, 4, "test", 20us));
  for (size_t rank = 0; rank < 3; ++rank) connect_pair(*communicators[rank], *communicators[rank + 1], GetParam());
  communicators[3]->liveness().poison(Error(ErrorKind::kTransport, "rank 9 has exited", 9));
  ASSERT_TRUE(eventually([&] { return communicators[0]->liveness().is_poisoned(); }));
  const auto error = error_of([&] { communicators[0]->liveness().throw_if_poisoned(); });
  EXPECT_EQ(error->rank(), 9);
  EXPECT_EQ(std::string(error->what()), "rank 3 reported: rank 9 has exited");
}

TEST_P(Faults, WhoConnectsToAFailedGroupIsToldWhy) {
  Communicator first(0, 2, "test", 20us), second(1, 2, "test", 20us);
  first.liveness().poison(Error(ErrorKind::kAborted, "it was too late", 0));
  connect_pair(first, second, GetParam());
  ASSERT_TRUE(eventually([&] { return second.liveness().is_poisoned(); }));
  EXPECT_EQ(std::string(error_of([&] { second.liveness().throw_if_poisoned(); })->what()),
            "rank 0 reported: it was too late");
}

TEST_P(Faults, ABrokenConnectionYieldsToTheCauseOnTheControlLink) {
  for (int repetition = 0; repetition < 20; ++repetition) {
    auto communicators = make_communicators(2, GetParam());
    std::thread leaver([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(repetition % 4));
      communicators[1]->liveness().poison(Error(ErrorKind::kInvalidArgument, "the real cause", 1));
      communicators[1]->close();  // the data connections break at once
      communicators[1].reset();
    });
    const auto error = error_of_recv(*communicators[0], 1, 30s);
    leaver.join();
    ASSERT_TRUE(error);
    EXPECT_EQ(std::string(error->what()), "rank 1 reported: the real cause");
  }
}

// ---- interrupts

TEST_P(Faults, AnInterruptEndsAWait) {
  auto communicators = make_communicators(2, GetParam());
  std::atomic<int> calls{0};
  const auto begin = Clock::now();
  const auto error = error_of([&] {
    uint8_t byte;
    communicators[0]->begin(stamp(1), Deadline::after(30s), [&] {
      if (++calls == 3) throw Error(ErrorKind::kAborted, "Ctrl-C");
    });
    communicators[0]->recv(1, &byte, 1);
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(std::string(error->what()), "Ctrl-C");
  EXPECT_LT(seconds_since(begin), 5);
  communicators[0]->end();
  // The next operation has no interrupt unless it asks for one.
  error_of_recv(*communicators[0], 1, 150ms);
  EXPECT_EQ(calls.load(), 3);
}

TEST_P(Faults, AttachingTwiceIsRefused) {
  auto communicators = make_communicators(2, GetParam());
  const auto error = error_of([&] { connect_pair(*communicators[0], *communicators[1], GetParam()); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kInternal);
  EXPECT_CONTAINS(std::string(error->what()), "is connected twice");
}

// ---- where links are few: what one rank has seen the others hear of over those in between

// Ranks that are linked in a ring, and nothing else. Those that are to die are bare sockets, and tell nothing.
class Ring {
 public:
  Ring(int size, std::set<int> bare) : bare_(std::move(bare)) {
    std::vector<int> all;
    for (int rank = 0; rank < size; ++rank) all.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      processes_.push_back(std::make_shared<Process>());
      communicators_.push_back(std::make_unique<Communicator>(rank, size, "test", 20us));
      if (bare_.count(rank) == 0) communicators_.back()->liveness().join_process(processes_.back(), all, "test");
    }
  }
  ~Ring() {
    for (auto& communicator : communicators_) communicator->close();
    for (auto& process : processes_) process->close();
  }

  void link(int a, int b) {
    const auto fds = unix_pair();
    attach(a, b, fds[0]);
    attach(b, a, fds[1]);
  }
  void link_all() {
    for (int rank = 0; rank < size(); ++rank) link(rank, (rank + 1) % size());
  }
  // A link that ends without a goodbye of either.
  void link_and_break(int a, int b) {
    const auto at_a = unix_pair(), at_b = unix_pair();
    attach(a, b, at_a[0]);
    attach(b, a, at_b[0]);
    for (const int fd : {at_a[1], at_b[1]}) ::close(fd);
  }
  void kill(int rank) { bare_ends_[rank].clear(); }
  // The errors of the ranks that are left.
  std::vector<Error> errors() {
    std::vector<Error> errors;
    for (int rank = 0; rank < size(); ++rank) {
      if (bare_.count(rank) != 0) continue;
      Communicator& communicator = *communicators_[static_cast<size_t>(rank)];
      EXPECT_TRUE(eventually([&] { return communicator.liveness().is_poisoned(); })) << "rank " << rank;
      errors.push_back(*error_of([&] { communicator.liveness().throw_if_poisoned(); }));
    }
    return errors;
  }

 private:
  int size() const { return static_cast<int>(communicators_.size()); }
  void attach(int rank, int peer, int fd) {
    if (bare_.count(rank) == 0) {
      processes_[static_cast<size_t>(rank)]->attach(peer, fd);
    } else {
      bare_ends_[rank].emplace_back(fd);
    }
  }

  const std::set<int> bare_;
  std::vector<std::shared_ptr<Process>> processes_;
  Communicators communicators_;
  std::map<int, std::vector<Descriptor>> bare_ends_;
};

TEST(FewLinks, RanksOfARingNameTheSameDead) {
  for (const auto pause : {0ms, 30ms}) {
    Ring ring(7, {2, 5});  // 6, 0 and 1 are left, and 3 and 4
    ring.link_all();
    ring.kill(5);
    std::this_thread::sleep_for(pause);
    ring.kill(2);
    for (const Error& error : ring.errors()) {
      EXPECT_EQ(error.ranks(), (std::vector<int>{2, 5})) << error.what();
      EXPECT_EQ(error.rank(), 2) << error.what();
      EXPECT_CONTAINS(std::string(error.what()), "rank 2");
    }
  }
}

TEST(FewLinks, NobodyIsNamedForAConnectionBetweenRanksThatAreThere) {
  Ring ring(5, {});
  for (int rank = 0; rank < 5; ++rank) {
    if (rank != 2) ring.link(rank, (rank + 1) % 5);
  }
  ring.link_and_break(2, 3);
  for (const Error& error : ring.errors()) {
    EXPECT_EQ(error.ranks(), std::vector<int>{}) << error.what();
    EXPECT_EQ(error.rank(), -1) << error.what();
    EXPECT_CONTAINS(std::string(error.what()), "is there, so the connection to it has failed");
  }
}

TEST(FewLinks, NobodyIsNamedForOneOfThreeConnections) {
  for (int round = 0; round < 20; ++round) {  // whichever of the two rank 2 hears first
    Ring ring(3, {});
    ring.link(1, 2);
    ring.link(2, 0);
    ring.link_and_break(0, 1);
    for (const Error& error : ring.errors()) {
      EXPECT_EQ(error.ranks(), std::vector<int>{}) << error.what();
      EXPECT_CONTAINS(std::string(error.what()), "is there, so the connection to it has failed");
    }
  }
}

TEST(FewLinks, WhoIsNamedByOthersDoesNotContradictThem) {
  const Error cause(ErrorKind::kTransport, "rank 0 does not answer", 0);
  for (const bool says_it_is_there : {false, true}) {  // not to one that was stopped until they had agreed
    const auto process = std::make_shared<Process>();
    Communicator communicator(0, 2, "test", 20us);
    communicator.liveness().join_process(process, {0, 1}, "test");
    const auto pair = unix_pair();
    process->attach(1, pair[0]);
    const auto tell = [&](const Losses& losses) {
      const Bytes bytes = frame(FrameType::kAbort, abort_bytes(cause, losses));
      check(send(pair[1], bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0, "send");
    };
    tell({{0}, {}});
    if (says_it_is_there) tell({{0}, {0}});
    ASSERT_TRUE(eventually([&] { return communicator.liveness().is_poisoned(); }));
    const auto error = error_of([&] { communicator.liveness().throw_if_poisoned(); });
    EXPECT_EQ(error->ranks(), says_it_is_there ? std::vector<int>{} : std::vector<int>{0}) << error->what();
    EXPECT_EQ(error->rank(), says_it_is_there ? -1 : 0);
    EXPECT_CONTAINS(std::string(error->what()), "rank 1 reported: rank 0 does not answer");
    communicator.close();
    process->close();
    ::close(pair[1]);
  }
}

TEST(FewLinks, WhoComesLaterIsToldOfAllTheDead) {
  Ring ring(4, {2, 3});
  ring.link(0, 2);
  ring.link(0, 3);
  ring.kill(2);
  ring.kill(3);
  std::this_thread::sleep_for(50ms);
  ring.link(0, 1);
  for (const Error& error : ring.errors()) EXPECT_EQ(error.ranks(), (std::vector<int>{2, 3})) << error.what();
}

TEST(FewLinks, NothingIsWaitedForWhereAllAreLinked) {
  auto shortest = Clock::duration::max();
  for (int round = 0; round < 5; ++round) {
    Ring ring(3, {2});  // each rank is every other's neighbor
    ring.link_all();
    const auto begin = Clock::now();
    ring.kill(2);
    for (const Error& error : ring.errors()) EXPECT_EQ(error.ranks(), std::vector<int>{2});
    shortest = std::min(shortest, Clock::now() - begin);
  }
  EXPECT_LT(shortest, 100ms);
}

// ---- a peer without a link: others are asked, and those that are asked find out

// Rank 1, at the bare end of its link to rank 0: answers what it is asked about others.
class Witness {
 public:
  using Hears = std::function<Hearing(Clock::duration since_first)>;
  Witness(int fd, Hears hears) : fd_(fd), thread_([this, hears = std::move(hears)] { answer(hears); }) {}
  ~Witness() {
    is_over_ = true;
    thread_.join();
  }
  size_t num_asked() const { return num_asked_; }

 private:
  void answer(const Hears& hears) {
    std::optional<Clock::time_point> first;
    for (; !is_over_; std::this_thread::sleep_for(1ms)) {
      for (const auto& [type, payload] : frames_at(fd_.get(), true)) {
        if (type == FrameType::kStatusRequest) say(frame(FrameType::kStatus, bytes_of(PeerStatus{})));
        Inquiry inquiry;
        if (type != FrameType::kInquiry || payload.size() != sizeof inquiry) continue;
        std::memcpy(&inquiry, payload.data(), sizeof inquiry);
        ++num_asked_;
        say_heard({-1, Hearing::kHears});  // which no rank has asked
        if (!first) {
          first = Clock::now();
          std::this_thread::sleep_for(20ms);  // all that has come until then is about no rank
        }
        say_heard({inquiry.about, hears(Clock::now() - *first)});
        say_heard({-1, Hearing::kHears});
      }
    }
  }

  void say_heard(const Testimony& testimony) { say(frame(FrameType::kTestimony, bytes_of(testimony), "")); }
  void say(const Bytes& bytes) { (void)!::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }

  const Descriptor fd_;
  std::atomic<bool> is_over_{false};
  std::atomic<size_t> num_asked_{0};
  std::thread thread_;
};

// Rank 0 of three or four, linked to rank 1 at most; what the connector is told to note of the others, it notes at
// once.
class Unlinked {
 public:
  enum State { kSilent, kHostAnswers };

  explicit Unlinked(std::map<int, State> states, int size = 4) : communicator(0, size, "test", 20us) {
    communicator.liveness().join_process(process, size == 3 ? std::vector{0, 1, 2} : std::vector{0, 1, 2, 3}, "test");
    communicator.set_connector([this, states](int peer) {
      dialed.insert(peer);
      const auto found = states.find(peer);
      if (found != states.end())
        communicator.liveness().note_unreachable(peer, "no way to it", found->second == kHostAnswers);
    });
  }
  ~Unlinked() {
    communicator.close();
    process->close();
  }

  std::unique_ptr<Witness> linked_to(Witness::Hears hears) {
    const auto pair = unix_pair();
    process->attach(1, pair[0]);
    return std::make_unique<Witness>(pair[1], std::move(hears));
  }
  // Does what the dialer does while rank 2 takes no connection, beside the worker.
  Error doubt() {
    EXPECT_TRUE(eventually([&] {
      communicator.liveness().dial_probed();
      communicator.liveness().doubt_unlinked(2, 1s, "cannot connect to rank 2");
      return communicator.liveness().is_poisoned();
    }));
    return *error_of([&] { communicator.liveness().throw_if_poisoned(); });
  }

  const std::shared_ptr<Process> process = std::make_shared<Process>();
  Communicator communicator;
  std::set<int> dialed;
};

TEST(UnlinkedPeers, OneThatNobodyHearsIsNamed) {
  for (const int size : {3, 4}) {
    Unlinked unlinked({{3, Unlinked::kHostAnswers}}, size);
    const auto witness = unlinked.linked_to([](Clock::duration since_first) {  // as long as it takes to find out
      return since_first < 350ms ? Hearing::kNotYetKnown : Hearing::kHearsNothing;
    });
    unlinked.communicator.liveness().note_unreachable(2, "no way to it", false);
    std::this_thread::sleep_for(300ms);  // of itself it knows: what follows waits for the witness only
    const auto begin = Clock::now();
    const Error error = unlinked.doubt();
    EXPECT_EQ(error.kind(), ErrorKind::kTransport);
    EXPECT_EQ(error.rank(), 2);
    EXPECT_CONTAINS(std::string(error.what()), "cannot connect to rank 2; nor does anybody else hear from rank 2");
    EXPECT_LT(seconds_since(begin), 2);
    EXPECT_EQ(unlinked.dialed, size == 3 ? std::set<int>{} : std::set<int>{3}) << "another one to ask";
  }
}

TEST(UnlinkedPeers, NobodyIsNamedForWhatOthersHearOrCannotTell) {
  for (const auto hearing : {Hearing::kHears, Hearing::kCannotTell}) {
    Unlinked unlinked({{3, Unlinked::kHostAnswers}});
    const auto witness = unlinked.linked_to([&](Clock::duration) { return hearing; });
    const Error error = unlinked.doubt();
    EXPECT_EQ(error.rank(), -1);
    EXPECT_CONTAINS(std::string(error.what()), "cannot connect to rank 2");
    EXPECT_EQ(contains(error.what(), "; of the other ranks, 1 could not tell whether it is there"),
              hearing == Hearing::kCannotTell);
  }
}

TEST(UnlinkedPeers, WhoReachesNobodyNamesItself) {
  Unlinked unlinked({{1, Unlinked::kSilent}, {3, Unlinked::kSilent}});
  const Error error = unlinked.doubt();
  EXPECT_EQ(error.rank(), 0);
  EXPECT_CONTAINS(std::string(error.what()), "this rank hears from none of 3 others: its own host is cut off");
  EXPECT_EQ(unlinked.dialed, (std::set<int>{1, 3}));
}

TEST(UnlinkedPeers, OthersAreAskedAtTheDeadlineToo) {
  Unlinked unlinked({{2, Unlinked::kSilent}, {3, Unlinked::kHostAnswers}});
  const auto witness = unlinked.linked_to([](Clock::duration) { return Hearing::kHearsNothing; });
  const auto error = error_of_recv(unlinked.communicator, 2, 400ms);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(error->rank(), 2);
  EXPECT_CONTAINS(std::string(error->what()), "no way to it; nor does anybody else hear from rank 2");
}

TEST(UnlinkedPeers, WhoIsAskedAboutOneDialsIt) {
  for (const auto state : {Unlinked::kSilent, Unlinked::kHostAnswers}) {
    Unlinked unlinked({{2, state}});
    const auto hearing = [&] { return unlinked.process->hearing_of(2); };
    const auto begin = Clock::now();
    EXPECT_EQ(hearing(), Hearing::kNotYetKnown);
    EXPECT_EQ(unlinked.dialed, std::set<int>{}) << "not on the thread that answers";
    unlinked.communicator.liveness().dial_probed();
    EXPECT_EQ(unlinked.dialed, std::set<int>{2});
    std::set<Hearing> heard;
    EXPECT_TRUE(eventually([&] {
      heard.insert(hearing());
      return heard.count(Hearing::kNotYetKnown) == 0 || heard.size() > 1;
    }));
    heard.erase(Hearing::kNotYetKnown);
    EXPECT_EQ(heard, std::set<Hearing>{state == Unlinked::kSilent ? Hearing::kHearsNothing : Hearing::kCannotTell});
    EXPECT_GE(Clock::now() - begin, 300ms) << "a host may take that long";
  }
}

TEST(UnlinkedPeers, ManyGroupsAskAsOne) {
  constexpr size_t kNumGroups = 200;
  const auto process = std::make_shared<Process>();
  const auto pair = unix_pair();
  process->attach(1, pair[0]);
  Witness witness(pair[1], [](Clock::duration) { return Hearing::kNotYetKnown; });
  Communicators groups;
  for (size_t i = 0; i < kNumGroups; ++i) {
    const std::string name = "group " + std::to_string(i);
    groups.push_back(std::make_unique<Communicator>(0, 3, name, 20us));
    groups.back()->liveness().join_process(process, {0, 1, 2}, name);
  }
  const auto begin = Clock::now();
  do {
    for (auto& group : groups) group->liveness().doubt_unlinked(2, 10s, "cannot connect to rank 2");
    std::this_thread::sleep_for(10ms);
  } while (Clock::now() - begin < 300ms);
  const auto lasted = Clock::now() - begin;
  EXPECT_TRUE(eventually([&] { return witness.num_asked() > 0; }));
  EXPECT_LE(witness.num_asked(), 1u + lasted / 50ms) << "once for all of them, every 50 ms";
  for (auto& group : groups) EXPECT_FALSE(group->liveness().is_poisoned());
  for (auto& group : groups) group->close();
  process->close();
}

TEST(UnlinkedPeers, WhatOneGroupHasAskedAnotherOneKnows) {
  const auto process = std::make_shared<Process>();
  const auto pair = unix_pair();
  process->attach(1, pair[0]);
  Witness witness(pair[1], [](Clock::duration) { return Hearing::kHearsNothing; });
  Communicators groups;
  for (const char* const name : {"first", "second"}) {
    groups.push_back(std::make_unique<Communicator>(0, 3, name, 20us));
    groups.back()->liveness().join_process(process, {0, 1, 2}, name);
  }
  EXPECT_TRUE(eventually([&] {
    for (auto& group : groups) group->liveness().doubt_unlinked(2, 10s, "cannot connect to rank 2");
    return groups[0]->liveness().is_poisoned() && groups[1]->liveness().is_poisoned();
  }));
  for (auto& group : groups) {
    const auto error = error_of([&] { group->liveness().throw_if_poisoned(); });
    EXPECT_EQ(error->rank(), 2);
    EXPECT_CONTAINS(std::string(error->what()), "nor does anybody else hear from rank 2");
  }
  for (auto& group : groups) group->close();
  process->close();
}

}  // namespace
}  // namespace bagua::testing

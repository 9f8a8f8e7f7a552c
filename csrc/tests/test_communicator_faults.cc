// What a waiting rank is told: peers that leave or die, deadlines with the culprit's name, first
// causes of others, interrupts.
#include <future>

#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

class Faults : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Transports, Faults, ::testing::Values(kShm, kTcp, kTorch), kind_name);

// Over torch a message of a collective leaves when its receiver asks for it.
class BufferedFaults : public Faults {};

INSTANTIATE_TEST_SUITE_P(Transports, BufferedFaults, ::testing::Values(kShm, kTcp), kind_name);

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What rank `rank` is told when it receives from `peer` within `timeout`.
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
    // One of the two may still have told that it has lost the other one, and is not counted then: by nobody.
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
  communicators[2]->poison(Error(ErrorKind::kInvalidArgument, "the third is ill"));
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
  communicators[1]->poison(Error(ErrorKind::kAborted, "failed after it had sent", 1));
  while (!communicators[0]->is_poisoned()) std::this_thread::sleep_for(1ms);
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
                  "and has finished none before, and it is not in a collective now");
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
                     communicators[1]->poison(Error(ErrorKind::kAborted, "the end of the test"));
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
  const auto failures = run_threads({[&] { wait_and_say(ended, [&] { wait_for_next(0, 80ms); }); },
                                     [&] { wait_for_next(1, 30s); }, [&] { wait_for_next(2, 30s); },
                                     [&] {
                                       ended.get_future().wait();
                                       communicators[1]->poison(Error(ErrorKind::kAborted, "the end of the test"));
                                       communicators[2]->poison(Error(ErrorKind::kAborted, "the end of the test"));
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
    communicators.back()->join_process(processes[static_cast<size_t>(rank)], {job_ranks[0], job_ranks[1]}, "test");
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
  others[0]->set_num_waiters(std::make_shared<std::atomic<int>>(1));
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
                                       others[0]->poison(Error(ErrorKind::kAborted, "the end of the test"));
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
  others[0]->set_num_waiters(std::make_shared<std::atomic<int>>(1));
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
                                       others[0]->poison(Error(ErrorKind::kAborted, "the end of the test"));
                                     }});
  const auto error = error_of(failures[0]);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()),
                  "rank 1 has not called it; and has finished none before, and it is in all_reduce #3 of 1 uint8 (SUM) "
                  "of group 'test' now");
}

TEST_P(Faults, WhoLeavesForAFailureElsewhereSaysSo) {
  const auto process = std::make_shared<Process>();
  const auto communicators = pair_of(GetParam(), {2, 1}, {nullptr, process});
  Communicator failed(0, 2, "elsewhere", 20us);
  failed.join_process(process, {1, 2}, "elsewhere");
  failed.poison(Error(ErrorKind::kDeadlineExceeded, "rank 1 does not answer", 1));
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
      communicators[rank]->poison(error);
      throw;
    }
  };
  const auto failures = run_threads({[&] { wait_and_tell(0, 1, 150ms); }, [&] { wait_and_tell(1, 2, 150ms); }});
  for (const auto& failure : failures) {
    const auto error = error_of(failure);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->rank(), 2);
    EXPECT_CONTAINS(std::string(error->what()), "rank 2 has not called it; and has finished none before");
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
    EXPECT_TRUE(eventually([&] { return communicator.status().waiting_for == 2; }));
    EXPECT_EQ(communicator.status().operation, stamp(4));
    communicator.poison(Error(ErrorKind::kAborted, "the end of the test", 1));
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
    communicator.set_connector([&](int peer) { communicator.note_unreachable(peer, "the cable is cut", names_peer); });
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
    communicator.blame(1, 0.05, [&] { communicator.take_answer(1, process.status(group)); });
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
      communicators[1]->take_answer(2, process.status(PeerStatus::kHasLeft));
    }
  });
  std::promise<void> ended;
  const auto failures = run_threads({[&] {
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
                                       communicators[1]->poison(Error(ErrorKind::kAborted, "the end of the test"));
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
    communicators[2]->poison(Error(ErrorKind::kInvalidArgument, "bucket 3 holds a NaN", 2, "all_reduce"));
    communicators[2]->poison(Error(ErrorKind::kInternal, "a consequence"));
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
  communicators[3]->poison(Error(ErrorKind::kTransport, "rank 9 has exited", 9));
  ASSERT_TRUE(eventually([&] { return communicators[0]->is_poisoned(); }));
  const auto error = error_of([&] { communicators[0]->throw_if_poisoned(); });
  EXPECT_EQ(error->rank(), 9);
  EXPECT_EQ(std::string(error->what()), "rank 3 reported: rank 9 has exited");
}

TEST_P(Faults, WhoConnectsToAFailedGroupIsToldWhy) {
  Communicator first(0, 2, "test", 20us), second(1, 2, "test", 20us);
  first.poison(Error(ErrorKind::kAborted, "it was too late", 0));
  connect_pair(first, second, GetParam());
  ASSERT_TRUE(eventually([&] { return second.is_poisoned(); }));
  EXPECT_EQ(std::string(error_of([&] { second.throw_if_poisoned(); })->what()), "rank 0 reported: it was too late");
}

TEST_P(Faults, ABrokenConnectionYieldsToTheCauseOnTheControlLink) {
  for (int repetition = 0; repetition < 20; ++repetition) {
    auto communicators = make_communicators(2, GetParam());
    std::thread leaver([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(repetition % 4));
      communicators[1]->poison(Error(ErrorKind::kInvalidArgument, "the real cause", 1));
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

}  // namespace
}  // namespace bagua::testing

// Verdicts from answers alone: who is named for every end of a chain, and that what is old or unknown convicts no rank.
#include "csrc/communicator/blame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

// Rank 1 of the job's ranks 10, 11 and 12, which wait for rank 2.
const GroupRanks kRanks{1, 3, "trio", {10, 11, 12}};
constexpr double kAllowedSeconds = 1.0;

Operation barrier(uint32_t sequence) {
  Operation operation;
  operation.kind = OperationKind::kBarrier;
  operation.sequence = sequence;
  return operation;
}

ChainEnd chain_end(ChainEnd::State state, int job_rank, int witness = 11) {
  ChainEnd end;
  end.rank = job_rank;
  end.witness = witness;
  end.state = state;
  end.silent_ms = 400;
  return end;
}

Verdict judge(const PeerStatus& theirs, uint32_t age_ms = 0) {
  return judge_answer(kRanks, barrier(7), 2, theirs, age_ms, 100, kAllowedSeconds);
}

TEST(Blame, RanksOfTheGroupAndOfTheJob) {
  EXPECT_EQ(kRanks.job_rank(2), 12);
  EXPECT_EQ(kRanks.group_rank(10), 0);
  EXPECT_EQ(kRanks.group_rank(3), -1);
  EXPECT_EQ(kRanks.describe_rank(12), "rank 2");
  EXPECT_EQ(kRanks.describe_rank(3), "rank 3 of the job");
  const GroupRanks all{0, 2, "world", {}};
  EXPECT_EQ(all.job_rank(1), 1);
  EXPECT_EQ(all.group_rank(1), 1);
}

TEST(Blame, TheEndOfAChain) {
  const struct {
    ChainEnd end;
    int culprit, unreachable, witness;
    const char* says;
  } cases[] = {
      {chain_end(ChainEnd::kIsNotWaiting, 12), 2, -1, -1, "rank 2 has not called it; it has finished none before"},
      {chain_end(ChainEnd::kHasNoGroup, 12), 2, -1, -1, "rank 2 has not made the group 'trio'"},
      {chain_end(ChainEnd::kHasLeftGroup, 12, 10), 2, -1, -1,
       "rank 2 has destroyed the group in which rank 0 waits for it"},
      {chain_end(ChainEnd::kDoesNotAnswer, 12), 2, -1, -1, "its process is stopped"},
      {chain_end(ChainEnd::kDoesNotAnswer, 11, 10), -1, -1, 10, "between rank 0 and rank 1 is silent"},
      {chain_end(ChainEnd::kUnreachable, 12), -1, 2, 11, "between rank 1 and rank 2 is silent"},
      {chain_end(ChainEnd::kIsNotWaiting, 99), -1, -1, -1, "rank 99 of the job has not called it"},
  };
  for (const auto& one : cases) {
    const Verdict verdict = judge_end(kRanks, one.end);
    EXPECT_TRUE(verdict.is_final);
    EXPECT_EQ(verdict.culprit, one.culprit) << verdict.what;
    EXPECT_EQ(verdict.unreachable, one.unreachable) << verdict.what;
    EXPECT_EQ(verdict.witness, one.witness) << verdict.what;
    EXPECT_TRUE(contains(verdict.what, one.says)) << verdict.what << "\n  lacks: " << one.says;
  }
}

TEST(Blame, OneThatWaitsInTurnIsNotAccused) {
  PeerStatus theirs;
  theirs.operation = barrier(7);
  theirs.waiting_for = kRanks.rank;
  const Verdict verdict = judge(theirs);
  EXPECT_TRUE(verdict.is_final);
  EXPECT_EQ(verdict.culprit, -1);
  EXPECT_TRUE(contains(verdict.what, "rank 2 waits for this rank in turn")) << verdict.what;
}

TEST(Blame, OneThatWaitsInTurnForAMessageIsInASendOrRecv) {
  PeerStatus theirs;
  theirs.waiting_for = kRanks.rank;
  const Verdict verdict = judge(theirs);
  EXPECT_TRUE(verdict.is_final);
  EXPECT_EQ(verdict.culprit, -1);
  EXPECT_TRUE(contains(verdict.what, "rank 2 waits for this rank in turn, in a send or recv: both are there"))
      << verdict.what;
}

TEST(Blame, TheChainIsTold) {
  PeerStatus theirs;
  theirs.operation = barrier(7);
  theirs.waiting_for = 0;
  theirs.end = chain_end(ChainEnd::kDoesNotAnswer, 42, 10);
  const Verdict verdict = judge(theirs);
  EXPECT_TRUE(verdict.is_final);
  EXPECT_EQ(verdict.culprit, -1) << "not a rank of this group";
  EXPECT_TRUE(contains(verdict.what,
                       "rank 2 waits for rank 0, and in the end for rank 42 of the job; rank 42 of the job "
                       "does not answer"))
      << verdict.what;
}

TEST(Blame, WhatIsOldOrUnknownConvictsNobody) {
  PeerStatus theirs;
  theirs.waiting_for = 0;
  theirs.end = chain_end(ChainEnd::kIsNotWaiting, 10);
  EXPECT_TRUE(judge(theirs).is_final);
  EXPECT_FALSE(judge(theirs, 101).is_final) << "from before this rank asked";
  theirs.end.age_ms = 101;
  EXPECT_FALSE(judge(theirs).is_final) << "the same, of who told it";
  theirs.end = chain_end(ChainEnd::kUnknown, 10);
  EXPECT_FALSE(judge(theirs).is_final);
  theirs.end = chain_end(ChainEnd::kDoesNotAnswer, 10);
  theirs.end.silent_ms = 200;
  EXPECT_FALSE(judge(theirs).is_final) << "silent for less than an answer may take";
}

TEST(Blame, WhoWaitsElsewhereForTooShortATimeWasLateBefore) {
  PeerStatus theirs;
  theirs.elsewhere = barrier(3);
  theirs.elsewhere_group = {'p', 'a', 'i', 'r'};
  theirs.end = chain_end(ChainEnd::kIsNotWaiting, 42);
  theirs.elsewhere_ms = 499;
  const Verdict late = judge(theirs);
  EXPECT_EQ(late.culprit, 2) << late.what;
  EXPECT_TRUE(contains(late.what, "it is in barrier #3 of group 'pair' now")) << late.what;
  theirs.elsewhere_ms = 500;
  const Verdict kept = judge(theirs);
  EXPECT_EQ(kept.culprit, -1) << kept.what;
  EXPECT_TRUE(contains(kept.what, "it waits in another group for rank 42 of the job")) << kept.what;
}

// ---- who is dead

using Ranks = std::set<int>;

TEST(Blame, LossesAreTheSameInWhateverOrderTheyAreHeard) {
  const Losses parts[] = {{{2}, {}}, {{4, 2}, {}}, {{4}, {4}}, {{}, {}}};
  std::array<size_t, 4> order{0, 1, 2, 3};
  do {
    Losses losses;
    bool has_grown = false;
    for (const size_t part : order) has_grown = losses.add(parts[part], 6) || has_grown;
    EXPECT_TRUE(has_grown);
    EXPECT_EQ(losses, (Losses{{2, 4}, {4}}));
    EXPECT_EQ(losses.dead(), std::vector<int>{2});
    for (const Losses& part : parts) EXPECT_FALSE(losses.add(part, 6)) << "it is known";
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Blame, RanksThatTheGroupDoesNotHaveAreNoLosses) {
  Losses losses;
  EXPECT_FALSE(losses.add({{-1, -(1 << 30), 3, 1 << 30}, {3, -1}}, 3));
  EXPECT_EQ(losses, Losses{});
  EXPECT_TRUE(losses.add({{0, 2, 3}, {}}, 3));
  EXPECT_EQ(losses.lost, (Ranks{0, 2}));
}

TEST(Blame, WhoseFaultItIsByWhatItTells) {
  const struct {
    Error cause;
    bool is_own;
  } cases[] = {
      {Error(ErrorKind::kInvalidArgument, "a NaN"), true},
      {Error(ErrorKind::kInvalidArgument, "a NaN", 3), true},
      {Error(ErrorKind::kInvalidArgument, "rank 1 called something else", 1), false},
      {Error(ErrorKind::kTransport, "this rank's host is cut off", 3), true},
      {Error(ErrorKind::kTransport, "rank 1 died", 1), false},
      {Error(ErrorKind::kTransport, "a connection is silent"), false},
      {Error(ErrorKind::kDeadlineExceeded, "a circle"), false},
      {Error(ErrorKind::kRemote, "rank 1 reported: rank 3 died", 3), false},
  };
  for (const auto& one : cases) EXPECT_EQ(is_own_fault(one.cause, 3), one.is_own) << one.cause.what();
}

}  // namespace
}  // namespace bagua::testing

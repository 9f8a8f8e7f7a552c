// A rank that rehearses: what it posts and waits for is written down, and what it receives is what it has sent.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "csrc/communicator/communicator.h"

namespace bagua {
namespace {

using Kind = RehearsedStep::Kind;

class CommunicatorRehearsal : public ::testing::Test {
 protected:
  CommunicatorRehearsal() : communicator_(0, 3, "rehearsal", std::chrono::microseconds(0)) {
    communicator_.rehearse();
    communicator_.set_same_host({true, false, false});
  }

  void begin() {
    communicator_.begin(Operation{.kind = OperationKind::kAllReduce}, Deadline::after(std::chrono::seconds(5)));
  }

  Rehearsal::Steps steps(size_t index) const { return communicator_.rehearsal()->operation(index); }

  Communicator communicator_;
};

TEST_F(CommunicatorRehearsal, StepsAreInTheirOrder) {
  uint8_t sent[8] = {1, 2, 3, 4, 5, 6, 7, 8}, received[8] = {};
  begin();
  Request receiving, sending;
  communicator_.post_recv(2, received, 8, &receiving);
  EXPECT_FALSE(receiving.done.load());
  communicator_.post_send(1, sent, 8, &sending);
  communicator_.wait(receiving);
  communicator_.wait(sending);
  EXPECT_TRUE(receiving.done.load() && sending.done.load());
  EXPECT_EQ(steps(0).size(), 0u) << "it has not ended";
  communicator_.end();
  EXPECT_EQ(0, std::memcmp(sent, received, 8));

  struct Expected {
    Kind kind;
    int peer;
    uint64_t bytes, about;
  };
  const std::vector<Expected> expected = {{Kind::kReceive, 2, 8, 1},
                                          {Kind::kSend, 1, 8, 0},
                                          {Kind::kWait, 2, 0, 0},
                                          {Kind::kWait, 1, 0, 1},
                                          {Kind::kEnd, -1, 0, RehearsedStep::kNone}};
  const Rehearsal::Steps found = steps(0);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].kind, expected[i].kind) << i;
    EXPECT_EQ(found[i].peer, expected[i].peer) << i;
    EXPECT_EQ(found[i].bytes, expected[i].bytes) << i;
    EXPECT_EQ(found[i].about, expected[i].about) << i;
    EXPECT_GE(found[i].busy_ns, 0) << i;
  }
  EXPECT_EQ(communicator_.bytes_sent(), 8u);
  EXPECT_EQ(communicator_.network_bytes_sent(), 8u);
}

TEST_F(CommunicatorRehearsal, WhatIsNotSentIsZero) {
  uint8_t sent[8] = {1, 2, 3, 4, 5, 6, 7, 8}, received[8] = {9, 9, 9, 9, 9, 9, 9, 9};
  begin();
  Request receiving, sending;
  communicator_.post_send(1, sent, 3, &sending);
  communicator_.post_recv(1, received, 5, &receiving);
  communicator_.wait(sending);
  communicator_.wait(receiving);
  communicator_.end();
  const uint8_t expected[8] = {1, 2, 3, 0, 0, 9, 9, 9};
  EXPECT_EQ(0, std::memcmp(received, expected, 8));
  EXPECT_EQ(steps(0)[0].about, 1u);
}

TEST_F(CommunicatorRehearsal, AMessageThatIsOverStandsInNoPlace) {
  uint8_t sent[8] = {1}, received[8] = {9};
  begin();
  communicator_.send(2, sent, 8);
  communicator_.recv(2, received, 8);
  communicator_.end();
  for (const RehearsedStep& step : steps(0)) {
    EXPECT_EQ(step.about == RehearsedStep::kNone, step.kind != Kind::kWait);
  }
  EXPECT_EQ(received[0], 0);
}

TEST_F(CommunicatorRehearsal, ProcessorTimeIsThatInBetween) {
  uint8_t byte = 0;
  begin();
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  while (std::chrono::steady_clock::now() < until) {
  }
  communicator_.send(1, &byte, 1);
  communicator_.end();
  const Rehearsal::Steps found = steps(0);
  EXPECT_GT(found[0].busy_ns, 1'000'000);
  EXPECT_LT(found[1].busy_ns, found[0].busy_ns);
}

}  // namespace
}  // namespace bagua

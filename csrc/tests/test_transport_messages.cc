// Messages between two ranks over every transport: contents, order, sizes around and beyond the ring, headers
// that do not fit, and cancelled requests whose memory is freed.
#include <deque>

#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

class Messages : public ::testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(Transports, Messages,
                         ::testing::Values(kShm, kShmSmallRing, kTcp, kTcpOneStream, kTcpFiveStreams, kTorch, kLocal),
                         kind_name);

// The bytes that one rank sends: both ends can compute them.
struct Plan {
  std::vector<size_t> sizes;

  Plan(uint32_t seed, size_t count, size_t largest) {
    std::mt19937 rng(seed);
    for (size_t i = 0; i < count; ++i) {
      switch (rng() % 5) {
        case 0: sizes.push_back(0); break;
        case 1: sizes.push_back(rng() % 8); break;
        case 2: sizes.push_back(rng() % 300); break;
        case 3: sizes.push_back(4096 - 32 + rng() % 64); break;  // around a small ring's end
        default: sizes.push_back(rng() % largest); break;
      }
    }
  }
  Bytes message(uint32_t sender, size_t i) const {
    std::mt19937 rng(1000 * sender + static_cast<uint32_t>(i));
    return random_bytes(rng, sizes[i]);
  }
};

// Sends and receives all messages of both plans, a random number of them under way, in random order of posting.
void exchange(Communicator& communicator, const Plan& mine, const Plan& theirs, uint32_t seed) {
  struct Item {
    Request request;
    Bytes bytes;
    size_t index;
    bool is_send;
  };
  std::mt19937 rng(seed + static_cast<uint32_t>(communicator.rank()));
  const int peer = 1 - communicator.rank();
  std::deque<Item> items;
  size_t sent = 0, received = 0;
  communicator.begin(stamp(1), Deadline::after(60s));
  while (sent < mine.sizes.size() || received < theirs.sizes.size() || !items.empty()) {
    const bool can_post = items.size() < 12 && (sent < mine.sizes.size() || received < theirs.sizes.size());
    if (can_post && (items.empty() || rng() % 3 != 0)) {
      const bool is_send = received == theirs.sizes.size() || (sent < mine.sizes.size() && rng() % 2 == 0);
      Item& item = items.emplace_back();
      item.is_send = is_send;
      item.index = is_send ? sent++ : received++;
      if (is_send) {
        item.bytes = mine.message(static_cast<uint32_t>(communicator.rank()), item.index);
        communicator.post_send(peer, item.bytes.data(), item.bytes.size(), &item.request);
      } else {
        item.bytes.resize(theirs.sizes[item.index]);
        communicator.post_recv(peer, item.bytes.data(), item.bytes.size(), &item.request);
      }
      continue;
    }
    // The oldest of them in posting order, so that neither rank waits for what the other has not posted: both sides
    // keep posting until twelve are under way.
    Item& oldest = items.front();
    communicator.wait(oldest.request);
    if (!oldest.is_send) {
      EXPECT_EQ(oldest.bytes, theirs.message(static_cast<uint32_t>(peer), oldest.index)) << "message " << oldest.index;
    }
    items.pop_front();
  }
  communicator.end();
}

TEST_P(Messages, RandomSizesBothWaysAtOnce) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto communicators = make_communicators(2, GetParam());
    // Both ranks send the same number of messages per window, so no order of waiting deadlocks a pair of rings.
    const Plan first(seed, 120, 30'000), second(seed + 100, 120, 30'000);
    const auto alternate = [&](Communicator& communicator, const Plan& mine, const Plan& theirs) {
      const int peer = 1 - communicator.rank();
      communicator.begin(stamp(1), Deadline::after(60s));
      for (size_t i = 0; i < mine.sizes.size(); ++i) {
        const Bytes out = mine.message(static_cast<uint32_t>(communicator.rank()), i);
        Bytes in(theirs.sizes[i]);
        communicator.send_recv(peer, out.data(), out.size(), peer, in.data(), in.size());
        EXPECT_EQ(in, theirs.message(static_cast<uint32_t>(peer), i)) << "message " << i;
      }
      communicator.end();
    };
    run_together(
        {[&] { alternate(*communicators[0], first, second); }, [&] { alternate(*communicators[1], second, first); }});
  }
}

TEST_P(Messages, ManyUnderWayInOneDirection) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto communicators = make_communicators(2, GetParam());
    const Plan plan(seed, 200, 20'000), nothing(0, 0, 1);
    run_together({[&] { exchange(*communicators[0], plan, nothing, seed); },
                  [&] { exchange(*communicators[1], nothing, plan, seed); }});
  }
}

TEST_P(Messages, LargerThanAnyBuffer) {
  auto communicators = make_communicators(2, GetParam());
  const size_t bytes = 9'000'001;
  std::mt19937 rng(1);
  const Bytes out[2] = {random_bytes(rng, bytes), random_bytes(rng, bytes)};
  const auto swap = [&](size_t rank) {
    Bytes in(bytes);
    communicators[rank]->begin(stamp(1, bytes), Deadline::after(60s));
    const int peer = static_cast<int>(1 - rank);
    communicators[rank]->send_recv(peer, out[rank].data(), bytes, peer, in.data(), bytes);
    communicators[rank]->end();
    EXPECT_TRUE(in == out[1 - rank]);
    EXPECT_EQ(communicators[rank]->bytes_sent(), bytes);
    EXPECT_EQ(communicators[rank]->bytes_received(), bytes);
  };
  run_together({[&] { swap(0); }, [&] { swap(1); }});
}

TEST_P(Messages, ZeroBytesSynchronise) {
  auto communicators = make_communicators(2, GetParam());
  std::atomic<int> stage{0};
  run_together({[&] {
                  communicators[0]->begin(stamp(1), Deadline::after(60s));
                  std::this_thread::sleep_for(20ms);
                  stage = 1;
                  communicators[0]->send(1, nullptr, 0);
                  communicators[0]->end();
                },
                [&] {
                  communicators[1]->begin(stamp(1), Deadline::after(60s));
                  communicators[1]->recv(0, nullptr, 0);
                  EXPECT_EQ(stage.load(), 1);
                  communicators[1]->end();
                }});
}

TEST_P(Messages, SmallOnesByTheThousand) {
  auto communicators = make_communicators(2, GetParam());
  const auto ping_pong = [&](size_t rank) {
    Communicator& communicator = *communicators[rank];
    const int peer = static_cast<int>(1 - rank);
    for (uint32_t i = 1; i <= 2000; ++i) {
      communicator.begin(stamp(i), Deadline::after(60s));
      uint32_t value = i;
      if (rank == 0) communicator.send(peer, &value, sizeof value);
      if (rank == 1) {
        communicator.recv(peer, &value, sizeof value);
        value += 1;
        communicator.send(peer, &value, sizeof value);
      }
      if (rank == 0) {
        communicator.recv(peer, &value, sizeof value);
        ASSERT_EQ(value, i + 1);
      }
      communicator.end();
    }
  };
  run_together({[&] { ping_pong(0); }, [&] { ping_pong(1); }});
}

// ---- what does not fit

void expect_mismatch(const Kind& kind, const Operation& sent, size_t sent_bytes, const Operation& expected,
                     size_t expected_bytes, const std::vector<std::string>& parts) {
  auto communicators = make_communicators(2, kind);
  Bytes out(sent_bytes), in(expected_bytes);
  const auto failures = run_threads({[&] {
                                       communicators[0]->begin(sent, Deadline::after(5s));
                                       communicators[0]->send(1, out.data(), out.size());
                                       // A small message may leave before anybody has looked at it.
                                       communicators[0]->recv(1, in.data(), in.size());
                                     },
                                     [&] {
                                       communicators[1]->begin(expected, Deadline::after(5s));
                                       try {
                                         communicators[1]->recv(0, in.data(), in.size());
                                       } catch (const Error& error) {
                                         communicators[1]->liveness().poison(error);  // as the engine does
                                         throw;
                                       }
                                     }});
  const auto receiver = error_of(failures[1]);
  ASSERT_TRUE(receiver);
  EXPECT_EQ(receiver->kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(receiver->rank(), 0);
  for (const auto& part : parts) EXPECT_CONTAINS(std::string(receiver->what()), part);
  const auto sender = error_of(failures[0]);
  ASSERT_TRUE(sender);
  for (const auto& part : parts) EXPECT_CONTAINS(std::string(sender->what()), part);
}

TEST_P(Messages, AnotherOperationIsAnErrorThatShowsBothSides) {
  expect_mismatch(GetParam(), stamp(7, 10), 40, stamp(7, 11), 44, {"all_reduce #7 of 10", "all_reduce #7 of 11"});
  expect_mismatch(GetParam(), stamp(7, 10, OperationKind::kBroadcast), 40, stamp(7, 10), 40,
                  {"broadcast #7 of 10", "all_reduce #7 of 10"});
  expect_mismatch(GetParam(), stamp(6, 10), 40, stamp(7, 10), 40, {"all_reduce #6", "all_reduce #7"});
}

TEST_P(Messages, AnotherSizeWithinTheSameOperationIsAnError) {
  expect_mismatch(GetParam(), stamp(7, 10), 40, stamp(7, 10), 36, {"in all_reduce #7 of 10", "40", "36"});
  // In two parts per message, on transports that split.
  expect_mismatch(GetParam(), stamp(7, 10), 400'000, stamp(7, 10), 500'000, {"400000", "500000"});
}

// ---- cancel

// More than the kernel's buffers of all streams hold, so that the message cannot have left before the cancel.
constexpr size_t kMoreThanBuffers = 100'000'000;

TEST_P(Messages, CancelledMemoryIsNeverTouchedAgain) {
  const size_t bytes = 3'000'000;
  auto communicators = make_communicators(2, GetParam());
  {
    Bytes small(100), large(bytes, 7);
    Request receiving, sending;
    communicators[0]->begin(stamp(1), Deadline::after(5s));
    communicators[0]->post_recv(1, small.data(), small.size(), &receiving);
    communicators[0]->post_send(1, large.data(), large.size(), &sending);
    communicators[0]->progress();
    communicators[0]->cancel();
  }
  // The peer goes on: what it sends would land in `small`, what it receives would come from `large`. Unless the
  // sockets' buffers had taken all of it before, the rest does not come.
  Bytes out(100), in(bytes);
  const auto failures = run_threads({[&] {
    communicators[1]->begin(stamp(1), Deadline::after(100ms));
    Request sending;
    communicators[1]->post_send(0, out.data(), out.size(), &sending);
    try {
      communicators[1]->recv(0, in.data(), in.size());
    } catch (...) {
      communicators[1]->cancel();
      throw;
    }
  }});
  EXPECT_TRUE(failures[0] || (GetParam().num_streams != 0 && in == Bytes(bytes, 7)));
  std::this_thread::sleep_for(20ms);
}

TEST(Operation, ShowsTheTopologyByItsNameWhereItHasOne) {
  Operation operation;
  operation.kind = OperationKind::kNeighborAverage;
  operation.sequence = 3;
  operation.root = 2;
  operation.variant = 7 | kHierarchical;
  EXPECT_EQ(describe(operation), "neighbor_average #3 of 0 uint8 in topology 2 at step 7, hierarchical");
  name_topologies_by([](int32_t number) -> std::string { return number == 2 ? "star" : ""; });
  EXPECT_EQ(describe(operation), "neighbor_average #3 of 0 uint8 in topology star at step 7, hierarchical");
  operation.root = -1;
  EXPECT_EQ(describe(operation), "neighbor_average #3 of 0 uint8 in topology -1 at step 7, hierarchical");
  name_topologies_by(nullptr);
}

TEST(Fifo, KeepsOrderWhileItGrowsAndWraps) {
  Fifo<int> fifo;
  std::deque<int> expected;
  std::mt19937 rng(3);
  for (int i = 0; i < 20'000; ++i) {
    if (expected.empty() || rng() % 100 < (i / 5000 % 2 == 0 ? 60 : 40)) {
      fifo.push(i);
      expected.push_back(i);
    } else {
      ASSERT_EQ(fifo.front(), expected.front());
      fifo.pop();
      expected.pop_front();
    }
    ASSERT_EQ(fifo.size(), expected.size());
    if (!expected.empty()) {
      ASSERT_EQ(fifo[expected.size() - 1], expected.back());
    }
  }
  fifo.clear();
  EXPECT_TRUE(fifo.empty());
}

}  // namespace
}  // namespace bagua::testing

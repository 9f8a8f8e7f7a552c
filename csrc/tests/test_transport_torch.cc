// TorchLink by itself: how messages are cut into frames, when requests are done, and that ends and failures let
// every rank go. What a channel promises is tested over every transport, this one too, in test_transport_messages.cc.
#include "csrc/tests/test_transport_forwarder.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

struct Ends {
  Doorbell doorbell;
  TorchLink left{1, doorbell}, right{0, doorbell};
};

MessageHeader header(uint64_t bytes, OperationKind kind = OperationKind::kAllReduce) {
  return {stamp(1, bytes, kind), bytes};
}

TEST(TorchLink, SizesGrowByANinthAtMost) {
  EXPECT_EQ(frame_size_bytes(0), 4096u);
  EXPECT_EQ(frame_size_bytes(kNumFrameSizes - 1), 1u << 20);
  for (int size = 1; size < kNumFrameSizes; ++size) {
    EXPECT_GT(frame_size_bytes(size), frame_size_bytes(size - 1));
    EXPECT_LE(8 * frame_size_bytes(size), 9 * frame_size_bytes(size - 1));
  }
}

TEST(TorchLink, BothEndsCutAMessageAlike) {
  constexpr size_t kInline = TorchLink::kHeadBytes - sizeof(MessageHeader);
  std::mt19937 rng(1);
  for (const size_t bytes : {size_t{0}, size_t{1}, kInline - 1, kInline, kInline + 1, kInline + 4096, kInline + 4097,
                             size_t{100'000}, kInline + (1 << 20), kInline + (1 << 20) + 1, size_t{3'333'333}}) {
    SCOPED_TRACE(bytes);
    Ends ends;
    const Bytes out = random_bytes(rng, bytes);
    Bytes in(bytes, 0), frame(TorchLink::kFrameBytes, 0xee);
    Request sending, receiving;
    ends.left.post_send(header(bytes), out.data(), &sending);
    ends.right.post_recv(header(bytes), in.data(), &receiving);
    size_t num_frames = 0, total = 0;
    for (int size; (size = ends.left.take(frame.data(), false)) != TorchLink::kNone; ++num_frames) {
      EXPECT_EQ(ends.right.expect(false), size);
      ends.right.deliver(frame.data());
      ends.left.sent();
      total += frame_size_bytes(size);
    }
    EXPECT_EQ(ends.right.expect(false), TorchLink::kNone);
    EXPECT_EQ(num_frames, 1 + (bytes > kInline ? (bytes - kInline + (1 << 20) - 1) >> 20 : 0));
    EXPECT_LE(total, std::max<size_t>(2 * 4096, 9 * (bytes + sizeof(MessageHeader)) / 8 + 4096));
    EXPECT_TRUE(sending.done && receiving.done);
    EXPECT_TRUE(in == out);
  }
}

TEST(TorchLink, PaddingIsZeros) {
  Ends ends;
  Bytes out(5000, 1), frame(TorchLink::kFrameBytes, 0xee);
  Request request;
  ends.left.post_send(header(out.size()), out.data(), &request);
  ASSERT_EQ(ends.left.take(frame.data(), false), 0);
  ASSERT_EQ(ends.left.take(frame.data(), false), 0);
  const size_t rest = out.size() - (TorchLink::kHeadBytes - sizeof(MessageHeader));
  EXPECT_EQ(std::count(frame.begin(), frame.begin() + 4096, 1), static_cast<long>(rest));
  EXPECT_EQ(std::count(frame.begin(), frame.begin() + 4096, 0), static_cast<long>(4096 - rest));
  EXPECT_EQ(frame[4096], 0xee);
}

TEST(TorchLink, ACollectivesMessageIsSentWhenTorchHasSentIt) {
  Ends ends;
  Bytes out(10, 1), frame(TorchLink::kFrameBytes);
  Request collective, message;
  EXPECT_FALSE(ends.left.has_unsent());
  ends.left.post_send(header(10), out.data(), &collective);
  ends.left.post_send(header(10, OperationKind::kPointToPoint), out.data(), &message);
  ends.left.take(frame.data(), false);
  ends.left.take(frame.data(), false);
  EXPECT_FALSE(collective.done);
  EXPECT_TRUE(message.done) << "it has been copied, and its sender may go on to receive";
  ends.left.sent();
  EXPECT_TRUE(collective.done);
  EXPECT_TRUE(ends.left.has_unsent());
  ends.left.sent();
  EXPECT_FALSE(ends.left.has_unsent());
}

TEST(TorchLink, ACollectivesMessageThatNobodyAsksForHoldsNobodyUp) {
  Ends ends;
  Bytes out(10, 1), frame(TorchLink::kFrameBytes);
  Request request;
  ends.left.post_send(header(10), out.data(), &request);
  ends.left.take(frame.data(), false);
  EXPECT_FALSE(ends.left.complete_overdue());
  EXPECT_FALSE(request.done);
  std::this_thread::sleep_for(TorchLink::kPatience + 1ms);
  EXPECT_TRUE(ends.left.complete_overdue());
  EXPECT_TRUE(request.done);
  EXPECT_TRUE(ends.left.has_unsent());
  ends.left.sent();
  EXPECT_FALSE(ends.left.has_unsent());
}

// Two ranks in different operations still exchange heads, and nothing after the head reaches the caller's memory.
TEST(TorchLink, HeadsOfDifferentOperationsMeet) {
  Ends ends;
  Bytes out(100'000, 1), in(50'000, 7), frame(TorchLink::kFrameBytes);
  Request sending, receiving, next;
  ends.left.post_send(header(out.size()), out.data(), &sending);
  ends.right.post_recv(header(in.size()), in.data(), &receiving);
  ends.right.post_recv(header(0), nullptr, &next);
  EXPECT_EQ(ends.right.expect(false), 0);
  EXPECT_EQ(ends.left.take(frame.data(), false), 0);
  Bytes rest(TorchLink::kFrameBytes);
  EXPECT_NE(ends.right.expect(false), ends.left.take(rest.data(), false)) << "torch sees two sizes, hence two tags";
  ends.right.deliver(frame.data());
  const auto error = error_of([&] { ends.right.throw_if_failed(); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kInvalidArgument);
  EXPECT_CONTAINS(std::string(error->what()), "of 100000 uint8");
  EXPECT_CONTAINS(std::string(error->what()), "of 50000 uint8");
  EXPECT_EQ(ends.right.expect(true), TorchLink::kEnded);
  ends.right.deliver(frame.data());  // what was under way
  EXPECT_EQ(in, Bytes(50'000, 7));
  EXPECT_FALSE(receiving.done || next.done);
}

TEST(TorchLink, TheEndLetsEverybodyGo) {
  Ends ends;
  Bytes data(10), frame(TorchLink::kFrameBytes);
  std::thread ender([&] {
    std::this_thread::sleep_for(20ms);
    ends.left.end();
  });
  run_together({[&] { EXPECT_EQ(ends.left.take(frame.data(), true), TorchLink::kEnded); },
                [&] { EXPECT_EQ(ends.left.expect(true), TorchLink::kEnded); }});
  ender.join();
  Request request;
  ends.left.post_send(header(10), data.data(), &request);
  ends.left.post_recv(header(10), data.data(), &request);
  EXPECT_EQ(ends.left.take(frame.data(), false), TorchLink::kEnded);
  EXPECT_EQ(ends.left.expect(false), TorchLink::kEnded);
  EXPECT_FALSE(ends.left.has_unsent());
  EXPECT_FALSE(request.done);
}

TEST(TorchLink, RequestsAndMemoryAreNotTouchedAfterTheEnd) {
  Ends ends;
  Bytes frame(TorchLink::kFrameBytes);
  {
    Bytes data(10'000, 1);
    Request sending, receiving;
    ends.left.post_send(header(data.size()), data.data(), &sending);
    ends.left.post_recv(header(data.size()), data.data(), &receiving);
    ends.left.take(frame.data(), false);
    ends.left.expect(false);
    ends.left.end();
  }
  ends.left.sent();  // both frames come back from torch when their owners are destroyed
  ends.left.deliver(frame.data());
}

TEST(TorchLink, TheFirstFailureWins) {
  Ends ends;
  Request request;
  ends.left.throw_if_failed();
  ends.left.post_send(header(0), nullptr, &request);
  EXPECT_TRUE(ends.left.has_unsent());
  ends.left.fail(Error(ErrorKind::kTransport, "connection reset", 1));
  ends.left.fail(Error(ErrorKind::kInternal, "a consequence", 1));
  EXPECT_EQ(std::string(error_of([&] { ends.left.throw_if_failed(); })->what()), "connection reset");
  EXPECT_FALSE(ends.left.has_unsent()) << "it never will be sent, so nobody need wait for it";
}

}  // namespace
}  // namespace bagua::testing

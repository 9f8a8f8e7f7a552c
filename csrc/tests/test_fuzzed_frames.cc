// Recorded conversations, changed at random, for whoever reads what peers send: control frames, the answers in them and
// the headers of messages. What is wrong may end a link or fail a group, and nothing else: the address sanitizer
// watches (scripts/sanitize.sh). FUZZ_SECONDS is how long each of them takes.
#include <cstdlib>
#include <random>

#include "csrc/communicator/blame.h"
#include "csrc/tests/test_control_frames.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

std::chrono::duration<double> fuzz_time() {
  const char* const seconds = std::getenv("FUZZ_SECONDS");
  return std::chrono::duration<double>(seconds == nullptr ? 0.3 : std::atof(seconds));
}

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  Bytes mutated(Bytes bytes) {
    for (size_t i = below(4); i > 0 && !bytes.empty(); --i) change(bytes);
    return bytes;
  }

  template <typename Pod>
  Pod mutated_pod(const Pod& pod) {
    Bytes bytes(sizeof pod);
    std::memcpy(bytes.data(), &pod, sizeof pod);
    for (size_t i = 1 + below(6); i > 0; --i) overwrite(bytes);
    Pod result;
    std::memcpy(&result, bytes.data(), sizeof result);
    return result;
  }

 private:
  void change(Bytes& bytes) {
    const size_t at = below(bytes.size());
    const auto begin = bytes.begin() + static_cast<long>(at);
    const auto end = begin + static_cast<long>(below(std::min<size_t>(bytes.size() - at, 200) + 1));
    switch (below(4)) {
      case 0: bytes.erase(begin, end); break;
      case 1: {
        const Bytes part(begin, end);
        bytes.insert(begin, part.begin(), part.end());
        break;
      }
      case 2: bytes.resize(at); break;
      default: overwrite(bytes);
    }
  }
  void overwrite(Bytes& bytes) {
    constexpr uint32_t kExtremes[] = {0, 1, 2, 8, 0x7f, 0x80, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
    const uint32_t value = below(3) == 0 ? static_cast<uint32_t>(random_()) : kExtremes[below(std::size(kExtremes))];
    const size_t at = below(bytes.size());
    std::memcpy(bytes.data() + at, &value, std::min(bytes.size() - at, below(2) == 0 ? size_t{1} : sizeof value));
  }

  std::mt19937 random_;
};

PeerStatus recorded_status() {
  PeerStatus status;
  status.operation = stamp(3, 10);
  status.last_finished = stamp(2, 10, OperationKind::kBroadcast);
  status.waiting_for = 1;
  status.elsewhere_ms = 40;
  status.elsewhere = stamp(9, 10, OperationKind::kNeighborAverage);
  std::memcpy(status.elsewhere_group.data(), "elsewhere", 9);
  status.end.rank = 1;
  status.end.witness = 2;
  status.end.state = ChainEnd::kDoesNotAnswer;
  status.end.operation = stamp(3, 10);
  return status;
}

// The frames that a peer sends in the life of a group.
std::vector<Bytes> recording() {
  std::vector<Bytes> frames;
  const auto say = [&frames](FrameType type, const Bytes& payload) {
    frames.push_back(frame(type, payload, "test"));
    frames.push_back(frame(type, payload, "another"));
  };
  const uint64_t segment[2] = {1, 4096};
  say(FrameType::kStatusRequest, bytes_of(StatusRequest{3}));
  say(FrameType::kStatus, bytes_of(recorded_status()));
  say(FrameType::kSegmentRequest, bytes_of(segment[0]));
  say(FrameType::kSegment, bytes_of(segment));
  say(FrameType::kReleased, bytes_of(segment[0]));
  say(FrameType::kAbort,
      abort_bytes(Error(ErrorKind::kDevice, "no memory is left", 1, "all_reduce"), {{0, 1, 2}, {2}}));
  say(FrameType::kLeave, error_bytes(Error(ErrorKind::kTransport, "rank 2 died", 2, "broadcast")));
  frames.push_back(frame(FrameType::kHeartbeat, {}, ""));
  for (const int about : {-1, 1, 2}) {
    frames.push_back(frame(FrameType::kInquiry, bytes_of(Inquiry{about}), ""));
    frames.push_back(frame(FrameType::kTestimony, bytes_of(Testimony{about, Hearing::kHearsNothing}), ""));
  }
  frames.push_back(frame(FrameType::kGoodbye, {}, ""));
  return frames;
}

TEST(Fuzzed, ControlFramesEndALinkAtWorst) {
  const auto recorded = recording();
  Mutator mutator(7);
  size_t num_ended = 0, num_rounds = 0;
  for (const auto end = Clock::now() + fuzz_time(); Clock::now() < end; ++num_rounds) {
    const auto process = std::make_shared<Process>();
    Communicator communicator(0, 3, "test", 0us);
    communicator.liveness().join_process(process, {0, 1, 2}, "test");
    const auto pair = unix_pair();
    process->attach(1, pair[0]);
    for (int i = 0; i < 20; ++i) {
      const Bytes bytes = mutator.mutated(recorded[mutator.below(recorded.size())]);
      if (send(pair[1], bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
    }
    shutdown(pair[1], SHUT_WR);
    EXPECT_TRUE(eventually([&] { return !process->is_linked(1); }));  // all of it has been read, or was refused before
    num_ended += communicator.liveness().is_poisoned();
    communicator.liveness().status();
    ::close(pair[1]);
    communicator.close();
    process->close();
  }
  EXPECT_GT(num_rounds, 10u);
  EXPECT_GT(num_ended, 0u);
}

TEST(Fuzzed, AnswersAreJudgedWhateverTheySay) {
  const PeerStatus recorded = recorded_status();
  const GroupRanks ranks{0, 3, "test", {4, 5, 6}};
  Mutator mutator(8);
  for (const auto end = Clock::now() + fuzz_time(); Clock::now() < end;) {
    for (int i = 0; i < 100; ++i) {
      const PeerStatus theirs = mutator.mutated_pod(recorded);
      const Verdict verdict = judge_answer(ranks, stamp(3, 10), 1, theirs, 10, 20, 1.0);
      EXPECT_LT(verdict.culprit, ranks.size);
      EXPECT_LT(judge_end(ranks, end_at(ranks, 1, theirs)).culprit, ranks.size);
      try {
        check_status(theirs, recorded, 1);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      }
    }
  }
}

TEST(Fuzzed, HeadersOfMessagesAreRefused) {
  constexpr size_t kBytes = 300;
  const MessageHeader header{stamp(1, kBytes), kBytes};
  Mutator mutator(9);
  Doorbell doorbell;
  size_t num_refused = 0, num_received = 0;
  for (const auto end = Clock::now() + fuzz_time(); Clock::now() < end;) {
    const auto pair = tcp_pair();
    Bytes wire = bytes_of(header), payload(kBytes);
    wire.resize(sizeof header + kBytes, 3);
    wire = mutator.mutated(std::move(wire));
    Request request;
    request.remaining = 1;
    TcpStream stream(pair[0], 1, doorbell);
    stream.post_recv(header, payload.data(), payload.size(), &request);
    check(send(pair[1], wire.data(), wire.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(wire.size()), "send");
    ::close(pair[1]);
    bool is_refused = false;
    EXPECT_TRUE(eventually([&] {
      try {
        stream.throw_if_failed();
      } catch (const Error&) {
        is_refused = true;
      }
      return is_refused || request.done.load();
    }));
    (is_refused ? num_refused : num_received) += 1;
    stream.cancel();
  }
  EXPECT_GT(num_refused, 0u);
  EXPECT_GT(num_received, 0u);
}

}  // namespace
}  // namespace bagua::testing

// The parts below a channel: control link, segments and their hand-over, descriptors in forks.
#include <fstream>
#include <set>

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "csrc/common/fork_guard.h"
#include "csrc/common/reactor.h"
#include "csrc/common/shared_segments.h"
#include "csrc/tests/test_control_frames.h"
#include "csrc/tests/test_transport_pairs.h"

#if defined(__SANITIZE_THREAD__)
// When a segment is isolated, the kernel changes what lies behind its addresses, and each page is touched, by an atomic
// that changes nothing, while the program's threads write: none of their writes is lost. The sanitizer sees writes.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:bagua::SegmentRegistry::conceal\n";
}
#endif

namespace bagua::testing {
namespace {

// ---- control link

// A link whose other end is a bare socket, and what it tells its owner.
struct BareLink {
  explicit BareLink(ProcessLink::Pace pace = ProcessLink::Pace(10s)) {
    const auto pair = unix_pair();
    peer = pair[1];
    process_link = std::make_shared<ProcessLink>(
        Descriptor(pair[0]), pace,
        [this](ProcessLink&, FrameType type, const std::string& group, const uint8_t*, size_t) {
          if (on_unrouted) on_unrouted();
          note("unrouted: " + group + " " + std::to_string(static_cast<uint32_t>(type)));
        });
    link = std::make_shared<ControlLink>(process_link, "test", 1);
    ControlLink::Events events;
    events.on_abort = [this](const Error& error, const Losses& theirs) {
      note("abort: " + std::string(error.what()));
      std::lock_guard lock(mutex);
      losses = theirs;
    };
    events.on_lost = [this](const std::string& how) { note("lost: " + how); };
    events.on_failure = [this](const Error& error) { note("failure: " + std::string(error.what())); };
    events.on_leave = [this](const std::optional<Error>&) { note("leave"); };
    events.on_status = [this](const PeerStatus&) { note("status"); };
    events.my_status = [](const StatusRequest&) { return PeerStatus{}; };
    events.on_segment = [this] { note("segment"); };
    events.on_released = [this] { note("released"); };
    events.on_silence = [this](const ProcessLink::Silence&) { note("silence"); };
    link->start(std::move(events));
    process_link->start();
  }
  ~BareLink() {
    process_link->stop();
    link->stop();
    if (peer >= 0) ::close(peer);
  }

  void note(const std::string& text) {
    std::lock_guard lock(mutex);
    notes.push_back(text);
  }
  std::vector<std::string> taken() {
    std::lock_guard lock(mutex);
    return notes;
  }
  bool saw(const std::string& part) {
    for (const auto& text : taken()) {
      if (contains(text, part)) return true;
    }
    return false;
  }
  void write_all(const Bytes& bytes) { check(send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0, "send"); }
  void close_peer() { ::close(std::exchange(peer, -1)); }

  int peer = -1;
  std::function<void()> on_unrouted;  // on the reactor's thread
  std::shared_ptr<ProcessLink> process_link;
  std::shared_ptr<ControlLink> link;
  std::mutex mutex;
  std::vector<std::string> notes;
  Losses losses;  // as they were told last
};

TEST(ControlLink, FramesByteByByte) {
  BareLink bare;
  for (const Bytes& whole : {frame(FrameType::kStatus, Bytes(sizeof(PeerStatus))), frame(FrameType::kLeave, {})}) {
    for (const uint8_t byte : whole) bare.write_all({byte});
  }
  EXPECT_TRUE(eventually([&] { return bare.saw("leave"); }));
  bare.close_peer();
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(bare.taken(), (std::vector<std::string>{"status", "leave"})) << "an end after leaving is no loss";
}

TEST(ControlLink, AnEndWithoutLeavingIsALoss) {
  BareLink bare;
  bare.write_all(frame(FrameType::kStatus, Bytes(3)));  // of the wrong size: ignored
  bare.write_all({1, 2, 3});                            // half a header
  bare.close_peer();
  EXPECT_TRUE(eventually([&] { return bare.saw("lost: closed its connection"); }));
  EXPECT_EQ(bare.taken().size(), 1u);
}

TEST(ControlLink, AnEndWithBytesOfOursUnreadIsALossInTheSameWords) {
  BareLink bare;
  bare.link->request_status({});
  pollfd readable{bare.peer, POLLIN, 0};
  ASSERT_EQ(poll(&readable, 1, 10000), 1);
  bare.close_peer();  // which resets the connection
  EXPECT_TRUE(eventually([&] { return !bare.taken().empty(); }));
  EXPECT_TRUE(bare.saw("lost: closed its connection")) << bare.taken().front();
}

TEST(ControlLink, AnEndAfterAGoodbyeIsNoLoss) {
  PeerStatus has_left;
  has_left.group = PeerStatus::kHasLeft;  // before this rank came to the group
  Bytes answer(sizeof has_left);
  std::memcpy(answer.data(), &has_left, sizeof has_left);
  for (const Bytes& goodbye : {frame(FrameType::kGoodbye, {}, ""), frame(FrameType::kStatus, answer)}) {
    BareLink bare;
    bare.write_all(goodbye);
    bare.close_peer();
    EXPECT_TRUE(eventually([&] { return bare.saw("leave"); }));
    EXPECT_FALSE(bare.saw("lost"));
  }
}

TEST(ControlLink, AnEndlessFrameIsRefused) {
  BareLink bare;
  bare.write_all({4, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f});
  EXPECT_TRUE(eventually([&] { return bare.saw("lost: sent a control frame of 2147483647 bytes"); }));
  // Nothing behind it is read: the connection is over, which the peer hears though the link is still held.
  uint8_t byte;
  EXPECT_TRUE(eventually([&] { return recv(bare.peer, &byte, 1, MSG_DONTWAIT) == 0; }));
  const Bytes more = frame(FrameType::kLeave, {});
  EXPECT_LT(send(bare.peer, more.data(), more.size(), MSG_NOSIGNAL), 0);
  EXPECT_EQ(bare.taken().size(), 1u);
}

TEST(ControlLink, AbortsOfAllLengths) {
  const std::string texts[] = {"", "x", std::string(300, 'y'), std::string(8192, 'z'), std::string(20'000, 'w')};
  for (const auto& text : texts) {
    BareLink receiving;
    // From a second link to the bare end of the first.
    ControlLink sender(std::make_shared<ProcessLink>(Descriptor(dup(receiving.peer)), ProcessLink::Pace(10s)), "test",
                       0);
    sender.send_abort(Error(ErrorKind::kInvalidArgument, text, 3, "all_reduce"), {});
    EXPECT_TRUE(eventually([&] { return receiving.saw("abort: " + text.substr(0, 8192)); }));
  }
}

TEST(ControlLink, AnAbortTellsWhoIsLost) {
  const Error cause(ErrorKind::kTransport, "it died", 3, "barrier");
  Losses many;
  for (int rank = 0; rank < 10'000; ++rank) {
    many.lost.insert(rank);
    if (rank % 3 == 0) many.there.insert(rank);
  }
  Losses told = many;  // more do not fit
  told.lost.erase(told.lost.lower_bound(4096), told.lost.end());
  told.there.erase(told.there.lower_bound(4096), told.there.end());
  for (const auto& [losses, expected] :
       {std::pair{Losses{}, Losses{}}, {Losses{{1, 5}, {5}}, Losses{{1, 5}, {5}}}, {many, told}}) {
    BareLink bare;
    bare.write_all(frame(FrameType::kAbort, abort_bytes(cause, losses)));
    EXPECT_TRUE(eventually([&] { return bare.saw("abort: it died"); }));
    std::lock_guard lock(bare.mutex);
    EXPECT_EQ(bare.losses, expected);
  }
}

TEST(ControlLink, AnAbortOfMoreLossesThanItHoldsIsIgnored) {
  const Error cause(ErrorKind::kTransport, "it died", 3, "barrier");
  const Bytes well_formed = abort_bytes(cause, {{1, 5}, {5}});
  BareLink bare;
  for (const uint32_t count : {9u, 4097u, 0x1fffffffu, 0x20000001u, 0xffffffffu}) {
    Bytes payload = well_formed;
    std::memcpy(payload.data(), &count, sizeof count);
    bare.write_all(frame(FrameType::kAbort, payload));
  }
  for (const size_t bytes : {size_t{0}, size_t{3}, size_t{4}, size_t{19}, size_t{20}}) {
    bare.write_all(
        frame(FrameType::kAbort, Bytes(well_formed.begin(), well_formed.begin() + static_cast<long>(bytes))));
  }
  bare.write_all(frame(FrameType::kLeave, {}));
  EXPECT_TRUE(eventually([&] { return bare.saw("leave"); }));
  EXPECT_EQ(bare.taken().size(), 1u);
}

TEST(ControlLink, RandomFramesDoNoHarm) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937 rng(seed);
    BareLink bare;
    for (int i = 0; i < 20; ++i) {
      const auto type = static_cast<FrameType>(rng() % 12);
      const std::string group = rng() % 4 == 0 ? std::string(rng() % 5, 't') : "test";
      try {
        bare.write_all(rng() % 8 == 0 ? random_bytes(rng, rng() % 40)
                                      : frame(type, random_bytes(rng, rng() % 60), group));
      } catch (const std::runtime_error&) {
        break;  // the link has given the connection up
      }
    }
    bare.close_peer();
    ASSERT_TRUE(eventually([&] { return bare.saw("lost") || bare.saw("leave"); })) << "seed " << seed;
  }
}

TEST(ControlLink, ALinkThatIsNotReadQueuesWithoutBlocking) {
  BareLink bare;
  const auto begin = Clock::now();
  for (int i = 0; i < 20'000; ++i) bare.link->request_status({});
  EXPECT_LT(Clock::now() - begin, 5s);
  // Everything comes out once it is read: 20000 frames, each a header of 8 bytes, the group and a request.
  size_t total = 0;
  Bytes buffer(65536);
  EXPECT_TRUE(eventually([&] {
    for (;;) {
      const ssize_t got = recv(bare.peer, buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (got <= 0) break;
      total += static_cast<size_t>(got);
    }
    return total == 20'000u * (8 + 2 + 4 + sizeof(StatusRequest));
  }));
}

// ---- one link for all groups of two processes

TEST(ProcessLink, EveryGroupGetsItsFramesAndTheEnd) {
  BareLink bare;
  std::atomic<int> num_left{0}, num_lost{0};
  ControlLink other(bare.process_link, "other", 4);
  ControlLink::Events events;
  events.on_leave = [&](const std::optional<Error>&) { ++num_left; };
  events.on_lost = [&](const std::string&) { ++num_lost; };
  other.start(std::move(events));
  bare.write_all(frame(FrameType::kLeave, {}, "other"));
  bare.write_all(frame(FrameType::kStatusRequest, Bytes(sizeof(StatusRequest)), "nobody's"));
  EXPECT_TRUE(eventually([&] { return num_left == 1 && bare.saw("unrouted: nobody's 3"); }));
  bare.close_peer();
  EXPECT_TRUE(eventually([&] { return bare.saw("lost: closed its connection"); }));
  EXPECT_EQ(num_lost, 0) << "it had left that group";
  EXPECT_TRUE(bare.process_link->has_ended());
  ControlLink late(bare.process_link, "late", 4);
  ControlLink::Events late_events;
  late_events.on_lost = [&](const std::string&) { ++num_lost; };
  late.start(std::move(late_events));
  EXPECT_EQ(num_lost, 1) << "a group that comes to a link that has ended hears it at once";
  other.stop();
  late.stop();
}

TEST(ProcessLink, AFrameWithoutItsGroupEndsTheLink) {
  for (const Bytes& broken : {Bytes{3, 0, 0, 0, 1, 0, 0, 0, 9}, Bytes{3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 9}}) {
    BareLink bare;
    bare.write_all(broken);
    EXPECT_TRUE(eventually([&] { return bare.saw("lost: sent a control frame without"); }));
  }
}

TEST(ProcessLink, AnIdleLinkSendsHeartbeats) {
  BareLink bare(ProcessLink::Pace(100ms));
  const Bytes heartbeat = frame(FrameType::kHeartbeat, {}, "");
  Bytes seen;
  EXPECT_TRUE(eventually([&] {
    Bytes buffer(4096);
    const ssize_t got = recv(bare.peer, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) seen.insert(seen.end(), buffer.begin(), buffer.begin() + got);
    return seen.size() >= 3 * heartbeat.size();
  }));
  for (size_t i = 0; i < 3 * heartbeat.size(); ++i) ASSERT_EQ(seen[i], heartbeat[i % heartbeat.size()]);
}

// ---- silence

TEST(ProcessLink, ALinkThatWasJustMadeIsNotSilent) {
  BareLink bare(ProcessLink::Pace(50ms));
  std::this_thread::sleep_for(120ms);  // three times as long as a peer may be silent
  EXPECT_TRUE(bare.taken().empty()) << "the peer may not have its end yet";
  bare.write_all(frame(FrameType::kHeartbeat, {}, ""));
  EXPECT_TRUE(eventually([&] { return bare.saw("silence"); })) << "it has, and says nothing more";
}

TEST(ProcessLink, AProcessThatWasStoppedDoesNotBlameItsPeers) {
  // Once the peer, too, is stopped and goes on, as on a host that was suspended: nothing is there to read after it.
  BareLink bare(ProcessLink::Pace(200ms));
  bare.on_unrouted = [] { std::this_thread::sleep_for(250ms); };  // nor does the reactor's thread tick meanwhile
  bare.write_all(frame(FrameType::kLeave, {}, "nobody's"));
  Bytes buffer(4096);
  const auto heartbeats_come = [&] {
    return eventually([&] { return recv(bare.peer, buffer.data(), buffer.size(), MSG_DONTWAIT) > 0; });
  };
  ASSERT_TRUE(eventually([&] { return bare.saw("unrouted"); }));
  (void)!recv(bare.peer, buffer.data(), buffer.size(), MSG_DONTWAIT);  // from before
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(heartbeats_come());          // it has looked by the second one
  EXPECT_FALSE(bare.saw("silence"));
  EXPECT_TRUE(eventually([&] { return bare.saw("silence"); })) << "its own stop excuses nothing that comes after";
}

TEST(ProcessLink, WhatHasJustBeenSentNeedNotBeAcknowledged) {
  struct : ProcessLink::Route {
    void on_frame(FrameType, const uint8_t*, size_t, Descriptor) override {}
    void on_end(const std::string&, bool) override {}
    void on_silence(const ProcessLink::Silence& silence) override { reaches_host.push_back(silence.reaches_host); }
    void on_lost_descriptor() override {}
    std::vector<bool> reaches_host;
  } route;
  auto pace = ProcessLink::Pace(1s);
  pace.heartbeat = 20ms;
  pace.silence = 30ms;
  const auto fds = tcp_pair();
  const Descriptor peer(fds[1]);
  ProcessLink link(Descriptor(fds[0]), pace);  // not started: this thread is its reactor
  link.add_route("test", &route);
  const int is_quick = 0;  // the peer's host delays what it acknowledges
  check(setsockopt(peer.get(), IPPROTO_TCP, TCP_QUICKACK, &is_quick, sizeof is_quick) == 0, "TCP_QUICKACK");
  const Bytes heartbeat = frame(FrameType::kHeartbeat, {}, "");
  check(send(peer.get(), heartbeat.data(), heartbeat.size(), MSG_NOSIGNAL) > 0, "send");
  ASSERT_TRUE(eventually([&] { return link.on_ready(), link.silent_for() < 10ms; }));
  std::this_thread::sleep_for(pace.silence);
  link.on_tick();  // sends a heartbeat
  EXPECT_FALSE(link.reaches_host()) << "the test is of no use where everything is acknowledged at once";
  link.on_tick();
  EXPECT_EQ(route.reaches_host, (std::vector<bool>{true, true}));
}

TEST(ProcessLink, SilenceIsToldAndAHeartbeatEndsIt) {
  BareLink bare(ProcessLink::Pace(500ms));
  const auto begin = Clock::now();
  while (Clock::now() - begin < 600ms) {
    bare.write_all(frame(FrameType::kHeartbeat, {}, ""));
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_FALSE(bare.saw("silence"));
  const auto since = Clock::now();
  EXPECT_TRUE(eventually([&] { return bare.saw("silence"); }));
  EXPECT_GE(Clock::now() - since, 350ms);
  EXPECT_LT(Clock::now() - since, 3s);
}

// ---- progress

// A posted message ends at once, unless the test holds it back.
struct CountingChannel : Channel {
  explicit CountingChannel(int& looks_) : looks(looks_) {}
  void post_send(const Operation&, const void*, size_t, Request* request) override { post(request); }
  void post_recv(const Operation&, void*, size_t, Request* request) override { post(request); }
  void post(Request* request) {
    if (holds_back) {
      held = request;
    } else {
      request->done.store(true);
    }
  }
  bool progress() override {
    ++looks;
    return false;
  }
  void cancel() override {}
  const char* kind() const override { return "counting"; }
  int& looks;
  bool holds_back = false;
  Request* held = nullptr;
};

TEST(Progress, LooksAtNoPeerThatNothingWasPostedTo) {
  Communicator communicator(0, 65, "test", 0us);
  std::vector<int> looks(65);
  std::vector<CountingChannel*> channels{nullptr};
  for (int peer = 1; peer < 65; ++peer) {
    auto channel = std::make_unique<CountingChannel>(looks[static_cast<size_t>(peer)]);
    channels.push_back(channel.get());
    communicator.attach(peer, std::move(channel));
  }
  const auto looked_at = [&] {
    std::set<int> peers;
    for (int peer = 1; peer < 65; ++peer) {
      if (std::exchange(looks[static_cast<size_t>(peer)], 0) > 0) peers.insert(peer);
    }
    return peers;
  };
  using Peers = std::set<int>;
  uint8_t byte = 0;
  communicator.progress();
  EXPECT_EQ(looked_at(), Peers{});
  for (const int peer : {7, 3}) {
    communicator.begin(stamp(static_cast<uint32_t>(peer)), Deadline::after(10s));
    communicator.send(peer, &byte, 1);
    communicator.progress();
    EXPECT_EQ(looked_at(), Peers{peer}) << "and at none of the operation before";
    communicator.end();
  }
  // A message stays under way while others begin and end.
  Operation message;
  message.kind = OperationKind::kPointToPoint;
  Request receiving;
  channels[9]->holds_back = true;
  communicator.begin(message, Deadline::after(10s));
  communicator.post_recv(9, &byte, 1, &receiving);
  communicator.end();
  communicator.begin(stamp(8), Deadline::after(10s));
  communicator.recv(4, &byte, 1);
  communicator.progress();
  EXPECT_EQ(looked_at(), (Peers{4, 9}));
  communicator.end();
  channels[9]->held->done.store(true);
  communicator.no_message_is_under_way();
  communicator.begin(stamp(9), Deadline::after(10s));
  communicator.progress();
  EXPECT_EQ(looked_at(), Peers{});
  communicator.end();
}

// ---- the links of a process

TEST(Process, ALinkThatCannotBeMadeIsAnErrorAndNoLink) {
  const auto process = std::make_shared<Process>();
  Communicator first(0, 2, "first", 20us), second(0, 2, "second", 20us);
  first.liveness().join_process(process, {0, 1}, "first");
  const auto error = error_of([&] { process->attach(1, memfd_create("no-connection", MFD_CLOEXEC)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTransport);
  EXPECT_CONTAINS(std::string(error->what()), "epoll refuses a connection");
  EXPECT_FALSE(process->is_linked(1));
  EXPECT_TRUE(first.liveness().is_poisoned()) << "it would wait for its peer";
  second.liveness().join_process(process, {0, 1}, "second");
  const auto pair = unix_pair();
  process->attach(1, pair[0]);
  EXPECT_TRUE(process->is_linked(1) && second.liveness().control(1) && !second.liveness().is_poisoned());
  for (auto* communicator : {&first, &second}) communicator->close();
  process->close();
  ::close(pair[1]);
}

// While it lives, this process opens nothing.
class NoDescriptors {
 public:
  NoDescriptors() {
    check(getrlimit(RLIMIT_NOFILE, &before_) == 0, "getrlimit");
    rlimit none = before_;
    none.rlim_cur = 0;
    check(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
};

TEST(Process, LinksNeedNoDescriptorsThatTheProcessDoesNotHave) {
  const auto pair = unix_pair();
  {
    const NoDescriptors none;
    const auto error = error_of([] { Process process; });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kTransport);
    EXPECT_CONTAINS(std::string(error->what()), "Too many open files; raise `ulimit -n`");
  }
  Process process;
  {
    const NoDescriptors none;
    process.attach(1, pair[0]);
  }
  EXPECT_TRUE(process.is_linked(1));
  ::close(pair[1]);
  EXPECT_TRUE(eventually([&] { return !process.is_linked(1); }));
}

size_t num_frames_at(int peer, FrameType type) {
  size_t count = 0;
  for (const auto& [of, payload] : frames_at(peer)) count += of == type;
  return count;
}

TEST(Process, WhoAsksAboutAFailedGroupIsToldWhy) {
  const auto process = std::make_shared<Process>();
  const auto pair = unix_pair();
  Communicator communicator(0, 3, "test", 20us);
  communicator.liveness().join_process(process, {0, 1, 2}, "test");
  process->attach(1, pair[0]);
  const Error cause(ErrorKind::kTransport, "rank 2 died", 2);
  communicator.liveness().poison(cause, false);
  const Bytes question = frame(FrameType::kStatusRequest, Bytes(sizeof(StatusRequest)));
  const auto ask = [&] { check(send(pair[1], question.data(), question.size(), MSG_NOSIGNAL) > 0, "send"); };
  ask();
  EXPECT_TRUE(eventually([&] { return num_frames_at(pair[1], FrameType::kStatus) == 1; }));
  EXPECT_EQ(num_frames_at(pair[1], FrameType::kAbort), 1u);
  communicator.close();
  ask();
  EXPECT_TRUE(eventually([&] { return num_frames_at(pair[1], FrameType::kAbort) == 2; })) << "after it was closed";
  const auto payload = abort_bytes(cause, {{2}, {}});
  for (const auto& [type, bytes] : frames_at(pair[1])) {
    if (type != FrameType::kAbort) continue;
    EXPECT_EQ(bytes, payload);
  }
  process->close();
  ::close(pair[1]);
}

TEST(Process, TellsWhetherARankOfOneOfItsGroupsIsThere) {
  const auto process = std::make_shared<Process>();
  const auto pair = unix_pair();
  std::atomic<int> dialed{-1};
  Communicator communicator(0, 2, "here", 20us);
  communicator.liveness().join_process(process, {4, 9}, "here");
  communicator.set_connector([&](int peer) {
    dialed = peer;
    communicator.liveness().note_unreachable(peer, "no way to it", false);
  });
  process->attach(1, pair[0]);
  const auto hearing_of = [&](int job_rank) {
    const Bytes question = frame(FrameType::kInquiry, bytes_of(Inquiry{job_rank}), "");
    check(send(pair[1], question.data(), question.size(), MSG_NOSIGNAL) > 0, "send");
    std::optional<Hearing> hearing;
    EXPECT_TRUE(eventually([&] {
      for (const auto& [type, payload] : frames_at(pair[1], true)) {
        Testimony testimony;
        if (type != FrameType::kTestimony || payload.size() != sizeof testimony) continue;
        std::memcpy(&testimony, payload.data(), sizeof testimony);
        EXPECT_EQ(testimony.about, job_rank);
        hearing = testimony.hearing;
      }
      return hearing.has_value();
    }));
    return hearing;
  };
  for (const int unknown : {-1, 0, 1, 4, 1 << 30}) EXPECT_EQ(hearing_of(unknown), Hearing::kCannotTell);
  EXPECT_EQ(hearing_of(9), Hearing::kNotYetKnown);
  communicator.liveness().dial_probed();
  EXPECT_EQ(dialed, 1);
  EXPECT_TRUE(eventually([&] { return hearing_of(9) == Hearing::kHearsNothing; }));
  communicator.close();
  process->close();
  ::close(pair[1]);
}

TEST(Process, WhoAnswersOneGroupNoMoreIsSilentToAll) {
  const auto process = std::make_shared<Process>();
  const auto pair = unix_pair();
  process->attach(1, pair[0]);
  Communicator first(0, 2, "first", 20us), second(0, 2, "second", 20us);
  first.liveness().join_process(process, {0, 1}, "first");
  second.liveness().join_process(process, {0, 1}, "second");
  Bytes answers;  // as the groups were made
  for (const char* const group : {"first", "second"}) {
    const Bytes answer = frame(FrameType::kStatus, bytes_of(PeerStatus{}), group);
    answers.insert(answers.end(), answer.begin(), answer.end());
  }
  check(send(pair[1], answers.data(), answers.size(), MSG_NOSIGNAL) > 0, "send");
  ASSERT_TRUE(eventually([&] { return first.liveness().control(1)->process_link().unanswered_for() == 0ns; }));
  first.liveness().control(1)->request_status({});
  std::this_thread::sleep_for(320ms);
  second.liveness().poison(Error(ErrorKind::kDeadlineExceeded, "rank 1 does not answer", 1));
  const auto begin = Clock::now();
  EXPECT_EQ(error_of([&] { second.liveness().throw_if_poisoned(); })->rank(), 1);
  EXPECT_LT(Clock::now() - begin, 100ms) << "it waits for nothing from that rank";
  for (auto* communicator : {&first, &second}) communicator->close();
  process->close();
  ::close(pair[1]);
}

TEST(Process, NobodyIsAskedAboutARankWhoseHostAnswers) {
  const auto process = std::make_shared<Process>(200ms);
  const auto stopped = unix_pair(), there = unix_pair();
  Communicator communicator(0, 3, "test", 20us);
  communicator.liveness().join_process(process, {0, 1, 2}, "test");
  process->attach(1, stopped[0]);
  process->attach(2, there[0]);
  const Bytes heartbeat = frame(FrameType::kHeartbeat, {}, "");
  check(send(stopped[1], heartbeat.data(), heartbeat.size(), MSG_NOSIGNAL) > 0, "send");  // its last word
  ASSERT_TRUE(eventually([&] { return communicator.liveness().is_poisoned(); }));
  const auto error = error_of([&] { communicator.liveness().throw_if_poisoned(); });
  EXPECT_EQ(error->rank(), 1);
  EXPECT_CONTAINS(std::string(error->what()), "rank 1 does not answer: its process is stopped");
  EXPECT_EQ(num_frames_at(there[1], FrameType::kAbort), 1u);
  EXPECT_EQ(num_frames_at(there[1], FrameType::kStatusRequest), 1u) << "as its link was made, and no more";
  EXPECT_EQ(num_frames_at(there[1], FrameType::kInquiry), 0u);
  communicator.close();
  process->close();
  for (const int fd : {stopped[1], there[1]}) ::close(fd);
}

// ---- segments

TEST(Segments, AreFoundByAnyOfTheirAddresses) {
  auto& registry = SegmentRegistry::instance();
  auto* first = static_cast<uint8_t*>(registry.create(10'000));
  auto* second = static_cast<uint8_t*>(registry.create(1));
  EXPECT_EQ(first[0], 0);
  EXPECT_EQ(first[9'999], 0);
  const auto whole = registry.find(first, 10'000), tail = registry.find(first + 9'990, 10);
  ASSERT_TRUE(whole && tail);
  EXPECT_EQ(whole->segment, tail->segment);
  EXPECT_EQ(tail->offset, 9'990u);
  EXPECT_NE(registry.find(second, 1)->segment, whole->segment);
  EXPECT_FALSE(registry.find(first, 10'001));
  EXPECT_FALSE(registry.find(first - 1, 2));
  EXPECT_FALSE(registry.find(&registry, 1));
  registry.release(first);
  EXPECT_FALSE(registry.find(first, 1));
  EXPECT_FALSE(registry.duplicate(whole->segment));
  registry.release(first);  // again is harmless
  registry.release(second);
}

size_t num_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += contains(line, "memfd:bagua-segment") ? 1 : 0;
  return count;
}

TEST(Segments, ArriveAtThePeerAndLeaveIt) {
  auto communicators = make_communicators(2, kShm);
  auto& registry = SegmentRegistry::instance();
  const size_t before = num_mappings();
  for (uint32_t i = 1; i <= 200; ++i) {
    auto* mine = static_cast<uint32_t*>(registry.create(100'000));
    mine[7] = i;
    const Address address = *communicators[0]->address_of(mine + 7, 4);
    communicators[1]->begin(stamp(i), Deadline::after(10s));
    auto* theirs = static_cast<uint32_t*>(communicators[1]->resolve(0, address, 4));
    EXPECT_EQ(*theirs, i);
    EXPECT_NE(static_cast<void*>(theirs), static_cast<void*>(mine + 7));
    EXPECT_EQ(communicators[1]->resolve(0, address, 4), theirs) << "the mapping is kept";
    *theirs = 1000 + i;
    registry.release(mine);
    EXPECT_EQ(*theirs, 1000 + i) << "it stays until the operation ends";
    communicators[1]->end();
  }
  // The last one may still be on its way, and is let go of at the next operation at the latest.
  communicators[1]->begin(stamp(999), Deadline::after(1s));
  EXPECT_TRUE(eventually([&] { return num_mappings() <= before + 1; })) << num_mappings() << " from " << before;
  communicators[1]->end();
}

TEST(Segments, AreUnmappedAtOnceByAnIdlePeer) {
  auto communicators = make_communicators(2, kShm);
  auto& registry = SegmentRegistry::instance();
  void* mine = registry.create(5000);
  communicators[1]->begin(stamp(1), Deadline::after(10s));
  EXPECT_NE(communicators[1]->resolve(0, *registry.find(mine, 1), 1), nullptr);
  communicators[1]->end();
  const size_t before = num_mappings();
  registry.release(mine);
  EXPECT_TRUE(eventually([&] { return num_mappings() == before - 2; })) << "the owner's mapping and the peer's";
}

TEST(Segments, AreTheirOwnersOnceIsolated) {
  constexpr size_t kNumbers = 100'000;
  auto communicators = make_communicators(2, kShm);
  auto& registry = SegmentRegistry::instance();
  auto* mine = static_cast<uint32_t*>(registry.create(kNumbers * 4));
  for (uint32_t i = 0; i < kNumbers; ++i) mine[i] = i;
  const Address address = *registry.find(mine, 4);
  communicators[1]->begin(stamp(1), Deadline::after(10s));
  auto* theirs = static_cast<uint32_t*>(communicators[1]->resolve(0, address, kNumbers * 4));
  theirs[5] = 77;
  EXPECT_EQ(mine[5], 77u);

  registry.expose(address.segment);
  registry.expose(address.segment);
  registry.conceal(address.segment, true);
  EXPECT_TRUE(registry.find(mine, 4)) << "as long as another operation needs it";
  registry.conceal(address.segment, false);
  EXPECT_FALSE(registry.find(mine, 4)) << "it cannot be shared again";
  EXPECT_FALSE(registry.duplicate(address.segment));
  for (uint32_t i = 0; i < kNumbers; ++i) ASSERT_EQ(theirs[i], i == 5 ? 77 : i) << "what the peer still reads";
  std::fill(theirs, theirs + kNumbers, 1);
  for (uint32_t i = 0; i < kNumbers; ++i) ASSERT_EQ(mine[i], i == 5 ? 77 : i);
  std::fill(mine, mine + kNumbers, 2);
  for (uint32_t i = 0; i < kNumbers; ++i) ASSERT_EQ(theirs[i], 1u);
  registry.conceal(address.segment, true);  // again is harmless
  communicators[1]->end();
  registry.release(mine);
}

TEST(Segments, LoseNoWriteWhenTheyAreIsolated) {
  constexpr size_t kPages = 500, kNumbersPerPage = 4096 / 4;
  auto& registry = SegmentRegistry::instance();
  for (int round = 0; round < 5; ++round) {
    auto* numbers = static_cast<uint32_t*>(registry.create(kPages * 4096));
    std::atomic<bool> is_over{false};
    uint32_t last = 0;
    std::thread writer([&] {  // a thread of the program, which knows nothing of it
      while (!is_over) {
        ++last;
        for (size_t page = 0; page < kPages; ++page) numbers[page * kNumbersPerPage + page % 3] = last;
      }
    });
    const uint64_t id = registry.find(numbers, 1)->segment;
    registry.expose(id);
    registry.conceal(id, true);
    is_over = true;
    writer.join();
    for (size_t page = 0; page < kPages; ++page) ASSERT_EQ(numbers[page * kNumbersPerPage + page % 3], last);
    registry.release(numbers);
  }
}

TEST(Segments, ArePeersNoMoreOnceTheOperationHasFailed) {
  auto communicators = make_communicators(2, kShm);
  auto& registry = SegmentRegistry::instance();
  void* mine = registry.create(5000);
  communicators[0]->begin(stamp(1), Deadline::after(10s));
  EXPECT_TRUE(communicators[0]->address_of(mine, 5000));
  communicators[0]->end();
  communicators[0]->begin(stamp(2), Deadline::after(10s));
  communicators[0]->end_and_isolate();
  EXPECT_TRUE(registry.find(mine, 5000)) << "of an operation that has ended";
  communicators[0]->begin(stamp(3), Deadline::after(10s));
  EXPECT_TRUE(communicators[0]->address_of(mine, 5000));
  communicators[0]->end_and_isolate();
  EXPECT_FALSE(registry.find(mine, 5000));
  registry.release(mine);
}

TEST(Segments, OutsideOfASegmentIsABug) {
  auto communicators = make_communicators(2, kShm);
  auto& registry = SegmentRegistry::instance();
  void* mine = registry.create(5000);
  const Address address = *registry.find(mine, 1);
  communicators[1]->begin(stamp(1), Deadline::after(10s));
  communicators[1]->resolve(0, address, 5000);
  const auto error = error_of([&] { communicators[1]->resolve(0, address, 5001); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kInternal);
  EXPECT_CONTAINS(std::string(error->what()), "named shared memory outside its segment");
  communicators[1]->end();
  registry.release(mine);
}

TEST(Segments, ComeAndGoWhilePeersAsk) {
  auto communicators = make_communicators(3, kShm);
  auto& registry = SegmentRegistry::instance();
  std::atomic<bool> stop{false};
  run_together({[&] {  // other memory of the process comes and goes, whose listeners are the links under test
                  while (!stop) registry.release(registry.create(4096));
                },
                [&] {
                  for (uint32_t i = 1; i <= 300; ++i) {
                    void* mine = registry.create(20'000);
                    const Address address = *registry.find(mine, 20'000);
                    for (size_t rank : {1u, 2u}) {
                      communicators[rank]->begin(stamp(i), Deadline::after(10s));
                      EXPECT_NE(communicators[rank]->resolve(0, address, 20'000), nullptr);
                      communicators[rank]->end();
                    }
                    registry.release(mine);
                  }
                  stop = true;
                }});
}

// ---- forks

bool is_open(int fd) { return fcntl(fd, F_GETFD) != -1; }

TEST(ForkGuard, AChildHasNoneOfTheDescriptors) {
  auto communicators = make_communicators(2, kTcp);
  Descriptor descriptor(dup(0)), moved(std::move(descriptor));
  EXPECT_EQ(descriptor.get(), -1);
  EXPECT_GE(moved.get(), 0);
  const int number = moved.get(), doorbell = communicators[0]->doorbell().fd();
  const uint32_t generation = process_generation();
  const pid_t child = fork();
  if (child == 0) {
    bool ok = process_generation() == generation + 1 && moved.get() == -1 && !is_open(number) && !is_open(doorbell);
    const int reused = dup(0);  // the lowest number that is free
    moved.reset();              // must not close another owner's
    ok = ok && is_open(reused);
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(is_open(number) && is_open(doorbell));
  // The ranks have not noticed.
  run_together({[&] {
                  communicators[0]->begin(stamp(1), Deadline::after(10s));
                  communicators[0]->send(1, "x", 1);
                },
                [&] {
                  char byte;
                  communicators[1]->begin(stamp(1), Deadline::after(10s));
                  communicators[1]->recv(0, &byte, 1);
                  EXPECT_EQ(byte, 'x');
                }});
}

TEST(ForkGuard, ADeathIsSeenAlthoughAChildLives) {
  auto communicators = make_communicators(2, kShm);
  int alive[2];
  ASSERT_EQ(pipe2(alive, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    ::close(alive[1]);
    (void)!read(alive[0], &byte, 1);
    _exit(0);
  }
  communicators[1].reset();
  EXPECT_TRUE(eventually([&] { return communicators[0]->liveness().is_poisoned(); }));
  ::close(alive[0]);
  ::close(alive[1]);
  waitpid(child, nullptr, 0);
}

TEST(ForkGuard, EveryProcessHasARegistryOfItsOwn) {
  auto& registry = SegmentRegistry::instance();
  void* mine = registry.create(4096);
  const pid_t child = fork();
  if (child == 0) {
    auto& own = SegmentRegistry::instance();
    const bool ok = &own != &registry && !own.find(mine, 1) && static_cast<uint8_t*>(mine)[0] == 0;
    own.release(mine);  // not its own: nothing happens
    _exit(ok && own.find(own.create(10), 10) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(registry.find(mine, 4096));
  registry.release(mine);
}

}  // namespace
}  // namespace bagua::testing

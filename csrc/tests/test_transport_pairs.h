// Two or more ranks as threads of one process over real channels: shared-memory rings, TCP over the loopback
// interface, torch's links with a stand-in for torch, or the local transport. For tests of the transports and of the
// engine.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "csrc/communicator/communicator.h"
#include "csrc/communicator/control_link.h"
#include "csrc/tests/test_transport_forwarder.h"
#include "csrc/tests/test_world.h"
#include "csrc/transport/local/local_channel.h"
#include "csrc/transport/shm/shm_channel.h"
#include "csrc/transport/tcp/tcp_channel.h"
#include "csrc/transport/torch/torch_channel.h"

namespace bagua::testing {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<uint8_t>;
using Communicators = std::vector<std::unique_ptr<Communicator>>;

inline void check(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string(what) + " failed: " + std::strerror(errno));
}

inline std::array<int, 2> unix_pair() {
  std::array<int, 2> fds;
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()) == 0, "socketpair");
  return fds;
}

// A real TCP connection over 127.0.0.1.
inline std::array<int, 2> tcp_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  check(listener >= 0 && bind(listener, generic, length) == 0 && listen(listener, 1) == 0, "listen");
  check(getsockname(listener, generic, &length) == 0, "getsockname");
  std::array<int, 2> fds;
  fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  check(fds[0] >= 0 && connect(fds[0], generic, length) == 0, "connect");
  fds[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  check(fds[1] >= 0, "accept");
  ::close(listener);
  return fds;
}

// The two ends of a link between processes. They begin to read once the groups have their routes.
inline std::array<std::shared_ptr<ProcessLink>, 2> link_pair(std::array<int, 2> fds,
                                                             std::chrono::milliseconds timeout = 10s) {
  std::array<std::shared_ptr<ProcessLink>, 2> links;
  for (size_t i = 0; i < 2; ++i) {
    links[i] = std::make_shared<ProcessLink>(Descriptor(fds[i]), ProcessLink::Pace(timeout));
  }
  return links;
}

inline std::shared_ptr<ControlLink> control_of(const Communicator& owner, std::shared_ptr<ProcessLink> link,
                                               const Communicator& peer) {
  return std::make_shared<ControlLink>(std::move(link), owner.name(), peer.rank());
}

inline void connect_shm(Communicator& dialer, Communicator& acceptor, size_t ring_bytes) {
  const Descriptor rings = create_sealed("test-rings", ShmChannel::segment_bytes(ring_bytes));
  const auto links = link_pair(unix_pair());
  const auto attach = [&](Communicator& communicator, Communicator& peer, bool is_dialer) {
    auto control = control_of(communicator, links[is_dialer ? 0 : 1], peer);
    auto channel = std::make_unique<ShmChannel>(peer.rank(), dup(rings.get()), ring_bytes, is_dialer,
                                                dup(peer.doorbell().fd()), control);
    communicator.attach(peer.rank(), std::move(channel), std::move(control));
  };
  attach(dialer, acceptor, true);
  attach(acceptor, dialer, false);
  for (const auto& link : links) link->start();
}

inline void connect_tcp(Communicator& a, Communicator& b, size_t num_streams) {
  const auto links = link_pair(tcp_pair());
  std::vector<int> fds[2];
  for (size_t i = 0; i < num_streams; ++i) {
    const auto stream = tcp_pair();
    fds[0].push_back(stream[0]);
    fds[1].push_back(stream[1]);
  }
  a.attach(b.rank(), std::make_unique<TcpChannel>(b.rank(), fds[0], a.doorbell()), control_of(a, links[0], b));
  b.attach(a.rank(), std::make_unique<TcpChannel>(a.rank(), fds[1], b.doorbell()), control_of(b, links[1], a));
  for (const auto& link : links) link->start();
}

inline void connect_torch(Communicator& a, Communicator& b) {
  const auto links = link_pair(tcp_pair());
  auto at_a = std::make_shared<TorchLink>(b.rank(), a.doorbell());
  auto at_b = std::make_shared<TorchLink>(a.rank(), b.doorbell());
  a.attach(b.rank(), std::make_unique<TorchChannel>(at_a), control_of(a, links[0], b));
  b.attach(a.rank(), std::make_unique<TorchChannel>(at_b), control_of(b, links[1], a));
  for (const auto& link : links) link->start();
  Forwarders::instance().connect(at_a, at_b);
  Forwarders::instance().connect(at_b, at_a);
}

// One way to connect ranks.
struct Kind {
  const char* name;
  size_t ring_bytes = 0;
  size_t num_streams = 0;
  bool through_torch = false;

  bool has_control() const { return ring_bytes != 0 || num_streams != 0 || through_torch; }
};
inline void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }
inline std::string kind_name(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }

inline constexpr Kind kShm{.name = "shm", .ring_bytes = 1 << 20};
inline constexpr Kind kShmSmallRing{.name = "shm_small_ring", .ring_bytes = 4 << 10};
inline constexpr Kind kTcp{.name = "tcp", .num_streams = 2};
inline constexpr Kind kTcpOneStream{.name = "tcp_one_stream", .num_streams = 1};
inline constexpr Kind kTcpFiveStreams{.name = "tcp_five_streams", .num_streams = 5};
inline constexpr Kind kTorch{.name = "torch", .through_torch = true};
inline constexpr Kind kLocal{.name = "local"};

inline void connect_pair(Communicator& a, Communicator& b, const Kind& kind) {
  if (kind.ring_bytes != 0) {
    connect_shm(b, a, kind.ring_bytes);
  } else if (kind.through_torch) {
    connect_torch(a, b);
  } else {
    connect_tcp(a, b, kind.num_streams);
  }
}

inline Communicators make_communicators(int size, const Kind& kind, std::chrono::microseconds spin = 20us,
                                        const std::string& key = "") {
  if (!kind.has_control()) return make_local_world(size, spin);
  Communicators communicators;
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<Communicator>(rank, size, "test", spin));
    if (!key.empty())
      communicators.back()->liveness().join_process(nullptr, {}, key);  // before there are links, which read it
  }
  for (size_t a = 0; a < communicators.size(); ++a) {
    for (size_t b = a + 1; b < communicators.size(); ++b) connect_pair(*communicators[a], *communicators[b], kind);
  }
  return communicators;
}

inline Operation stamp(uint32_t sequence, uint64_t numel = 1, OperationKind kind = OperationKind::kAllReduce) {
  Operation operation;
  operation.sequence = sequence;
  operation.kind = kind;
  operation.numel = numel;
  return operation;
}

// Runs functions on threads of their own and joins them; what they threw, null where they did not.
inline std::vector<std::exception_ptr> run_threads(const std::vector<std::function<void()>>& functions) {
  std::vector<std::exception_ptr> failures(functions.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < functions.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        functions[i]();
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

// The same for functions that must not throw.
inline void run_together(const std::vector<std::function<void()>>& functions) {
  for (const auto& failure : run_threads(functions)) {
    if (failure) std::rethrow_exception(failure);
  }
}

// The bagua::Error that `call` throws; a test failure if it throws none.
template <typename Call>
std::optional<Error> error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return std::nullopt;
}

inline std::optional<Error> error_of(const std::exception_ptr& failure) {
  return error_of([&] {
    if (failure) std::rethrow_exception(failure);
  });
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

#define EXPECT_CONTAINS(text, part) EXPECT_TRUE(contains(text, part)) << (text) << "\n  lacks: " << (part)

inline Bytes random_bytes(std::mt19937& rng, size_t count) {
  Bytes bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  return bytes;
}

// Polls until `condition` holds; false after five seconds.
template <typename Condition>
bool eventually(Condition condition) {
  const auto end = Clock::now() + 5s;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace bagua::testing

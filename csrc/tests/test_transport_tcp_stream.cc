// Tests of what a TcpStream asks of the kernel for bulk messages, read back from the sockets: without it hosts that are
// busy both ways wait for one another in steps of 40 ms, which the loopback interface does not show.
#include <linux/tcp.h>

#include "csrc/tests/test_transport_pairs.h"
#include "csrc/transport/tcp/tcp_stream.h"

namespace bagua::testing {
namespace {

constexpr size_t kBytes = 20 << 10;  // bulk, and less than a segment of the loopback interface

// A stream whose other end is a bare socket; `fd` is the stream's socket too, for options.
struct BareStream {
  BareStream() {
    const auto pair = tcp_pair();
    peer = pair[1];
    fd = dup(pair[0]);
    stream = std::make_unique<TcpStream>(pair[0], 1, doorbell);
  }
  ~BareStream() {
    stream.reset();
    ::close(fd);
    ::close(peer);
  }

  // The kernel's word for it is "not in pingpong mode": then acknowledgements are not held back.
  bool acknowledges_at_once() const {
    int value = -1;
    socklen_t length = sizeof value;
    check(getsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &value, &length) == 0, "getsockopt");
    return value == 1;
  }
  void hold_acknowledgements_back() const {
    const int zero = 0;
    check(setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &zero, sizeof zero) == 0, "setsockopt");
    ASSERT_FALSE(acknowledges_at_once());
  }

  Doorbell doorbell;
  int fd = -1, peer = -1;
  std::unique_ptr<TcpStream> stream;
};

TEST(TcpStream, EveryReadOfABulkMessageIsAcknowledgedAtOnce) {
  BareStream bare;
  const MessageHeader header{stamp(1, kBytes), kBytes};
  Bytes wire(sizeof header + kBytes, 3), payload(kBytes);
  std::memcpy(wire.data(), &header, sizeof header);
  Request request;
  request.remaining = 1;
  bare.stream->post_recv(header, payload.data(), payload.size(), &request);

  bare.hold_acknowledgements_back();
  const auto half = static_cast<ssize_t>(wire.size() / 2);
  check(send(bare.peer, wire.data(), static_cast<size_t>(half), MSG_NOSIGNAL) == half, "send");
  EXPECT_TRUE(eventually([&] { return bare.acknowledges_at_once(); }));

  bare.hold_acknowledgements_back();  // as TCP does by itself after a while
  const auto rest = static_cast<ssize_t>(wire.size()) - half;
  check(send(bare.peer, wire.data() + half, static_cast<size_t>(rest), MSG_NOSIGNAL) == rest, "send");
  ASSERT_TRUE(eventually([&] { return request.done.load(); }));
  EXPECT_TRUE(bare.acknowledges_at_once());
}

// A message that says where it ends is not held back for the next one to join its segment.
TEST(TcpStream, BulkMessagesEndWhereTheyEnd) {
  constexpr size_t kCount = 16;
  BareStream bare;
  const int send_buffer = 212'992;  // what a system allows by default: holds all that the peer's window does not
  check(setsockopt(bare.fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer) == 0, "setsockopt");
  Bytes payload(kBytes, 3);
  Request requests[kCount];
  for (Request& request : requests) {
    request.remaining = 1;
    bare.stream->post_send({stamp(1, kBytes), kBytes}, payload.data(), payload.size(), &request);
    EXPECT_TRUE(request.done.load()) << "in the send buffer at once";
  }
  Bytes received(kCount * (sizeof(MessageHeader) + kBytes));
  const ssize_t got = recv(bare.peer, received.data(), received.size(), MSG_WAITALL);
  ASSERT_EQ(got, static_cast<ssize_t>(received.size()));
  tcp_info info{};
  socklen_t length = sizeof info;
  check(getsockopt(bare.fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0, "getsockopt");
  EXPECT_GE(info.tcpi_data_segs_out, kCount) << "messages share segments";
}

}  // namespace
}  // namespace bagua::testing

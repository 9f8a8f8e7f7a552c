// Vectored, non-blocking socket input and output; see tcp_stream.h.
#include "csrc/transport/tcp/tcp_stream.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace bagua {
namespace {

// Parts per system call: enough to carry a burst of small messages at once.
constexpr size_t kMaxParts = 8;

// From here on a message is worth an acknowledgement of its own. TCP holds it back, up to 40 ms, where data goes both
// ways, in the hope of data to put it on; and a sender whose last bytes wait for it sends nothing new (its queues are
// kept small). The end of a message is held back too, for more to come (autocorking), unless it says that it is the
// end.
constexpr size_t kBulkBytes = 16 << 10;

void acknowledge_at_once(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);  // TCP forgets it: to be said after every read
}

}  // namespace

TcpStream::TcpStream(int fd, int peer, Doorbell& doorbell)
    : fd_(fd), peer_(peer), doorbell_(doorbell), reactor_(Reactor::instance()) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  reactor_id_ = reactor_->add(fd, this);
}

TcpStream::~TcpStream() { reactor_->remove(reactor_id_); }

void TcpStream::post_send(const MessageHeader& header, const uint8_t* data, size_t bytes, Request* request) {
  std::lock_guard lock(mutex_);
  // const_cast: sends only read through the pointer.
  sends_.push({header, const_cast<uint8_t*>(data), bytes, 0, request});
  if (sends_.size() == 1) write_locked();
}

void TcpStream::post_recv(const MessageHeader& header, uint8_t* data, size_t bytes, Request* request) {
  std::lock_guard lock(mutex_);
  recvs_.push({header, data, bytes, 0, request});
  if (recvs_.size() == 1) read_locked();  // the edge may have come before there was a buffer
}

void TcpStream::on_ready() {
  std::lock_guard lock(mutex_);
  if (!sends_.empty()) write_locked();
  if (!recvs_.empty()) read_locked();
}

void TcpStream::cancel() {
  std::lock_guard lock(mutex_);
  sends_.clear();
  recvs_.clear();
}

void TcpStream::throw_if_failed() {
  if (!failed_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  throw Error(*failure_);
}

void TcpStream::write_locked() {
  while (!sends_.empty() && !failure_) {
    std::array<iovec, 2 * kMaxParts> parts;
    size_t count = 0;
    bool is_bulk = false;
    for (size_t i = 0; i < std::min(sends_.size(), kMaxParts); ++i) {
      Part& part = sends_[i];
      is_bulk = is_bulk || part.bytes >= kBulkBytes;
      if (part.moved < sizeof(MessageHeader)) {
        parts[count++] = {reinterpret_cast<uint8_t*>(&part.header) + part.moved, sizeof(MessageHeader) - part.moved};
      }
      const size_t payload_moved = part.moved > sizeof(MessageHeader) ? part.moved - sizeof(MessageHeader) : 0;
      if (payload_moved < part.bytes) parts[count++] = {part.data + payload_moved, part.bytes - payload_moved};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | (is_bulk ? MSG_EOR : 0));
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) {
      fail_locked(Error(ErrorKind::kTransport,
                        "sending to rank " + std::to_string(peer_) + " failed: " + std::strerror(errno) +
                            "; its process died or the network between the hosts failed",
                        peer_));
      return;
    }
    size_t left = static_cast<size_t>(sent);
    while (left > 0) {
      Part& part = sends_.front();
      const size_t part_left = std::min(left, sizeof(MessageHeader) + part.bytes - part.moved);
      part.moved += part_left;
      left -= part_left;
      if (part.moved == sizeof(MessageHeader) + part.bytes) complete_locked(sends_);
    }
  }
}

void TcpStream::read_locked() {
  while (!recvs_.empty() && !failure_) {
    std::array<iovec, 2> parts;
    size_t count = 0;
    Part& part = recvs_.front();
    if (part.moved < sizeof(MessageHeader)) {
      parts[count++] = {reinterpret_cast<uint8_t*>(&incoming_) + part.moved, sizeof(MessageHeader) - part.moved};
    }
    const size_t payload_moved = part.moved > sizeof(MessageHeader) ? part.moved - sizeof(MessageHeader) : 0;
    if (payload_moved < part.bytes) parts[count++] = {part.data + payload_moved, part.bytes - payload_moved};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t got = recvmsg(fd_.get(), &message, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      const std::string how = got == 0 ? "closed the connection" : std::strerror(errno);
      fail_locked(Error(ErrorKind::kTransport,
                        "receiving from rank " + std::to_string(peer_) + " failed: " + how +
                            "; its process ended or the network between the hosts failed",
                        peer_));
      return;
    }
    if (part.bytes >= kBulkBytes) acknowledge_at_once(fd_.get());
    if (!advance_reads_locked(static_cast<size_t>(got))) return;
  }
}

// False when the peer's message is not the one that was posted.
bool TcpStream::advance_reads_locked(size_t bytes) {
  Part& part = recvs_.front();
  const bool had_header = part.moved >= sizeof(MessageHeader);
  part.moved += bytes;
  if (!had_header && part.moved >= sizeof(MessageHeader)) {
    try {
      check_header(incoming_, part.header, peer_);
    } catch (const Error& error) {
      fail_locked(error);
      return false;
    }
  }
  if (part.moved == sizeof(MessageHeader) + part.bytes) complete_locked(recvs_);
  return true;
}

void TcpStream::complete_locked(Fifo<Part>& queue) {
  Request* request = queue.front().request;
  queue.pop();
  if (request->remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    request->done.store(true, std::memory_order_release);  // from here on the request may be destroyed
    doorbell_.ring();
  }
}

void TcpStream::fail_locked(Error error) {
  failure_ = std::move(error);
  failed_.store(true, std::memory_order_release);
  doorbell_.ring();
}

}  // namespace bagua

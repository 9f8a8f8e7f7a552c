// TcpChannel: messages to a peer on another host over several TCP connections.
//
// Both ends know every message's size, so both compute the same split: a large message is cut into one
// contiguous part per stream, a small one goes whole to the streams in turn. Each part carries the
// message's header; a stream is in order, so no part needs to say which one it is.
#pragma once

#include <memory>
#include <vector>

#include "csrc/transport/tcp/tcp_stream.h"
#include "csrc/transport/transport.h"

namespace bagua {

class TcpChannel : public Channel {
 public:
  // Takes ownership of the connected sockets; both ends pass them in the same order.
  TcpChannel(int peer, const std::vector<int>& fds, Doorbell& doorbell);

  void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) override;
  void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) override;
  bool progress() override;
  void cancel() override;
  bool reports_end() const override { return true; }
  const char* kind() const override { return "tcp"; }

 private:
  // Calls part(stream, offset, bytes) for each part of a message; `turn` is the direction's message count.
  template <typename Function>
  void split(size_t bytes, uint64_t turn, Request* request, Function part);

  std::vector<std::unique_ptr<TcpStream>> streams_;
  uint64_t num_sent_ = 0;  // messages
  uint64_t num_received_ = 0;
};

}  // namespace bagua

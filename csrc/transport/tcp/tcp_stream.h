// TcpStream: one connection of a TcpChannel. Messages (or their parts) go out and come in in posted order,
// straight from and into the posted memory, header and payload in one vectored call.
//
// Whoever posts tries the socket at once; what does not fit, or has not come, is moved by the reactor
// (edge-triggered). Nothing is read while no receive is posted: TCP's own flow control holds the sender.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/common/fifo.h"
#include "csrc/common/fork_guard.h"
#include "csrc/common/reactor.h"
#include "csrc/transport/transport.h"

namespace bagua {

class TcpStream : public Reactor::Handler {
 public:
  // Takes ownership of `fd`, a connected socket; makes it non-blocking.
  TcpStream(int fd, int peer, Doorbell& doorbell);
  ~TcpStream() override;

  // A part of a message: `bytes` at `data`; `header` describes the whole message.
  void post_send(const MessageHeader& header, const uint8_t* data, size_t bytes, Request* request);
  void post_recv(const MessageHeader& header, uint8_t* data, size_t bytes, Request* request);
  void cancel();
  // Throws what the socket or the peer did wrong, if anything.
  void throw_if_failed();

  void on_ready() override;

 private:
  struct Part {
    MessageHeader header;
    uint8_t* data = nullptr;
    size_t bytes = 0;
    size_t moved = 0;  // of header and payload together
    Request* request = nullptr;
  };
  void write_locked();
  void read_locked();
  bool advance_reads_locked(size_t bytes);
  void complete_locked(Fifo<Part>& queue);
  void fail_locked(Error error);

  const Descriptor fd_;
  const int peer_;
  Doorbell& doorbell_;
  std::shared_ptr<Reactor> reactor_;
  uint64_t reactor_id_ = 0;

  std::mutex mutex_;  // guards everything below; never held while calling the reactor
  Fifo<Part> sends_;
  Fifo<Part> recvs_;
  MessageHeader incoming_;  // of the part at the front of recvs_
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace bagua

// ShmChannel: messages between two processes of one host through a pair of byte rings in a memfd.
//
// One segment per pair, made by the dialing side: ring 0 carries dialer -> acceptor, ring 1 the reverse.
// Each ring has one writer and one reader; `head` counts bytes written, `tail` bytes read. The worker
// threads of the two ranks copy in and out themselves: no other thread takes part, no system call is made
// except to wake a sleeping peer. Larger data does not come this way: collectives reduce in place through
// resolve().
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/common/doorbell.h"
#include "csrc/common/fifo.h"
#include "csrc/transport/transport.h"

namespace bagua {

class ShmChannel : public Channel {
 public:
  // Bytes of the memfd for rings of `ring_bytes` (a power of two) each.
  static size_t segment_bytes(size_t ring_bytes);

  // Maps `ring_fd` and the peer's doorbell page; closes both descriptors.
  ShmChannel(int peer, int ring_fd, size_t ring_bytes, bool is_dialer, int peer_doorbell_fd,
             std::shared_ptr<PeerMemory> peer_memory);
  ~ShmChannel() override;

  void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) override;
  void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) override;
  bool progress() override;
  void cancel() override;
  bool shares_memory() const override { return true; }
  void* resolve(const Address& address, size_t bytes) override;
  const char* kind() const override { return "shm"; }

 private:
  struct Ring;
  struct Message {
    MessageHeader header;
    uint8_t* data = nullptr;
    size_t moved = 0;  // of header and payload together
    Request* request = nullptr;
  };
  size_t in_ring(uint64_t bytes) const;
  bool push_some();
  bool pull_some();

  const int peer_;
  const size_t ring_bytes_;
  void* segment_ = nullptr;
  Ring* out_ = nullptr;
  Ring* in_ = nullptr;
  DoorbellWords* peer_doorbell_ = nullptr;
  std::shared_ptr<PeerMemory> peer_memory_;
  Fifo<Message> sends_;  // worker thread only, as the next two
  Fifo<Message> recvs_;
  MessageHeader incoming_;
};

}  // namespace bagua

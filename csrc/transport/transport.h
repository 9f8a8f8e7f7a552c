// The contract between the collectives and whatever moves their bytes.
//
// A Channel carries messages to and from one peer of one group. Messages of one direction arrive in the
// order in which they were posted, and both ends know every size beforehand: a receive is posted with
// its exact size into its final memory. Channels never block; the Communicator waits. Only the group's
// worker thread posts and makes progress; a channel may complete requests from a thread of its own.
//
// Every message is stamped with the Operation it belongs to, and the receiver compares the stamp with its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "csrc/common/device.h"
#include "csrc/common/operation.h"
#include "csrc/common/shared_segments.h"

namespace bagua {

// One posted send or receive. The caller keeps it, and the memory it names, alive until it is done or
// until Communicator::cancel has returned; after either, no thread touches them.
struct Request {
  std::atomic<bool> done{false};
  std::atomic<uint32_t> remaining{0};  // fragments still under way; the channel's own business
  int peer = -1;
  Stream stream;  // what orders the memory
};

// In front of every message on the wire and in every ring; 32 bytes, little-endian.
struct MessageHeader {
  Operation operation;
  uint64_t bytes = 0;
};
static_assert(sizeof(MessageHeader) == 32);

// Throws an InvalidArgument that shows both sides when a peer's message is not the one this rank expects.
void check_header(const MessageHeader& received, const MessageHeader& expected, int peer);

// A peer's shared memory, as far as it is mapped into this process.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // The address here of `bytes` bytes at the peer's `address`; nullptr while the mapping is being fetched (ask again
  // later).
  virtual void* map(const Address& address, size_t bytes) = 0;
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Both return at once; `request->done` turns true when the memory may be reused (send) or holds the
  // message (receive). Zero bytes is legal and still synchronises.
  virtual void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) = 0;
  virtual void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) = 0;

  // Moves what can be moved without blocking; true if anything moved. Throws Error when the peer has exited
  // or sent something that does not match.
  virtual bool progress() = 0;

  // Forgets all posted requests; after it returns their memory is not touched any more.
  virtual void cancel() = 0;

  // After a peer has left: whether progress() throws once everything that it sent before has been received. Without,
  // what it sent is there by the time that it leaves.
  virtual bool reports_end() const { return false; }

  // True for ranks that are threads of one process: every pointer is an Address (segment 0).
  virtual bool addresses_any_memory() const { return false; }
  // Shared memory: can the peer's memory be addressed from here at all, and if so where.
  virtual bool shares_memory() const { return false; }
  // Pointer, valid in this process, to `bytes` bytes that the peer named by `address`; nullptr while the
  // mapping is being fetched (ask again after progress()).
  virtual void* resolve(const Address&, size_t) { return nullptr; }

  // Whether `data` may lie on a device. Then a send takes what was enqueued on `request->stream` before it was posted,
  // and once a receive is done, what is enqueued there afterwards finds the message.
  virtual bool moves_device_memory() const { return false; }
  // Whether something is under way that nothing rings the doorbell for: a thread that waits looks again soon.
  virtual bool is_polled() const { return false; }

  // "shm", "tcp", "torch", "local", "pinned": for doctor, timeline and error messages
  virtual const char* kind() const = 0;
};

// A channel that moves device memory by means of one that moves the host's, which outlives it; from then on messages of
// the host go through it too, so that all keep their order.
using MakeDeviceChannel = std::function<std::unique_ptr<Channel>(Channel& host)>;

}  // namespace bagua

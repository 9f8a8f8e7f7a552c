// Byte rings between two processes; see shm_channel.h.
#include "csrc/transport/shm/shm_channel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/common/shared_segments.h"

namespace bagua {
namespace {

// How much is copied before the other side is told: small enough that both copies overlap in cache.
constexpr size_t kPublishBytes = 64 << 10;

}  // namespace

struct ShmChannel::Ring {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) uint8_t data[1];  // ring_bytes

  void write(uint64_t at, const uint8_t* from, size_t bytes, size_t capacity) {
    if (bytes == 0) return;  // `from` may be null then, which memcpy does not allow
    const size_t offset = at & (capacity - 1);
    const size_t first = std::min(bytes, capacity - offset);
    std::memcpy(data + offset, from, first);
    std::memcpy(data, from + first, bytes - first);
  }
  void read(uint64_t at, uint8_t* to, size_t bytes, size_t capacity) const {
    if (bytes == 0) return;
    const size_t offset = at & (capacity - 1);
    const size_t first = std::min(bytes, capacity - offset);
    std::memcpy(to, data + offset, first);
    std::memcpy(to + first, data, bytes - first);
  }
};

size_t ShmChannel::segment_bytes(size_t ring_bytes) { return 2 * (sizeof(Ring) + ring_bytes); }

ShmChannel::ShmChannel(int peer, int ring_fd, size_t ring_bytes, bool is_dialer, int peer_doorbell_fd,
                       std::shared_ptr<PeerMemory> peer_memory)
    : peer_(peer), ring_bytes_(ring_bytes), peer_memory_(std::move(peer_memory)) {
  const Descriptor ring(ring_fd), doorbell(peer_doorbell_fd);
  peer_doorbell_ = static_cast<DoorbellWords*>(map_shared(peer_doorbell_fd, kDoorbellBytes));
  try {
    segment_ = map_shared(ring_fd, segment_bytes(ring_bytes));
  } catch (...) {
    unmap_shared(peer_doorbell_, kDoorbellBytes);
    throw;
  }
  auto* rings = static_cast<uint8_t*>(segment_);
  auto* first = reinterpret_cast<Ring*>(rings);  // zero-filled by the kernel: both counters start at 0
  auto* second = reinterpret_cast<Ring*>(rings + sizeof(Ring) + ring_bytes);
  out_ = is_dialer ? first : second;
  in_ = is_dialer ? second : first;
}

ShmChannel::~ShmChannel() {
  unmap_shared(segment_, segment_bytes(ring_bytes_));
  unmap_shared(peer_doorbell_, kDoorbellBytes);
}

void ShmChannel::post_send(const Operation& operation, const void* data, size_t bytes, Request* request) {
  // const_cast: a send only reads through the pointer (push_some).
  auto* from = const_cast<uint8_t*>(static_cast<const uint8_t*>(data));
  sends_.push({{operation, bytes}, from, 0, request});
  if (sends_.size() == 1) push_some();
}

void ShmChannel::post_recv(const Operation& operation, void* data, size_t bytes, Request* request) {
  recvs_.push({{operation, bytes}, static_cast<uint8_t*>(data), 0, request});
  if (recvs_.size() == 1) pull_some();
}

bool ShmChannel::progress() {
  bool moved = false;
  if (!recvs_.empty()) moved = pull_some();
  if (!sends_.empty()) moved = push_some() || moved;
  return moved;
}

// The bytes in a ring by its counters, of which the peer writes one: beyond its size, a copy would leave the segment.
size_t ShmChannel::in_ring(uint64_t bytes) const {
  if (bytes > ring_bytes_) {
    throw Error(ErrorKind::kTransport,
                "rank " + std::to_string(peer_) + " says that " + std::to_string(bytes) + " bytes are in a ring of " +
                    std::to_string(ring_bytes_) + ": its memory is damaged",
                peer_);
  }
  return bytes;
}

// Copies queued messages into the outgoing ring while there is space.
bool ShmChannel::push_some() {
  bool moved = false;
  uint64_t head = out_->head.load(std::memory_order_relaxed);
  while (!sends_.empty()) {
    Message& message = sends_.front();
    size_t space = ring_bytes_ - in_ring(head - out_->tail.load(std::memory_order_acquire));
    if (message.moved == 0) {
      if (space < sizeof(MessageHeader)) break;
      out_->write(head, reinterpret_cast<const uint8_t*>(&message.header), sizeof(MessageHeader), ring_bytes_);
      head += sizeof(MessageHeader);
      space -= sizeof(MessageHeader);
      message.moved = sizeof(MessageHeader);
    }
    const size_t payload_moved = message.moved - sizeof(MessageHeader);
    const size_t part = std::min({space, message.header.bytes - payload_moved, kPublishBytes});
    if (part == 0 && payload_moved < message.header.bytes) break;
    out_->write(head, message.data + payload_moved, part, ring_bytes_);
    head += part;
    message.moved += part;
    out_->head.store(head, std::memory_order_release);
    moved = true;
    if (message.moved == sizeof(MessageHeader) + message.header.bytes) {
      message.request->done.store(true, std::memory_order_release);
      sends_.pop();
    }
    ring(*peer_doorbell_);
  }
  // A header without payload space behind it must be seen too.
  if (out_->head.load(std::memory_order_relaxed) != head) {
    out_->head.store(head, std::memory_order_release);
    ring(*peer_doorbell_);
    moved = true;
  }
  return moved;
}

// Copies what has arrived into the posted buffers.
bool ShmChannel::pull_some() {
  bool moved = false;
  uint64_t tail = in_->tail.load(std::memory_order_relaxed);
  while (!recvs_.empty()) {
    Message& message = recvs_.front();
    size_t available = in_ring(in_->head.load(std::memory_order_acquire) - tail);
    if (message.moved == 0) {
      if (available < sizeof(MessageHeader)) break;
      in_->read(tail, reinterpret_cast<uint8_t*>(&incoming_), sizeof(MessageHeader), ring_bytes_);
      check_header(incoming_, message.header, peer_);
      tail += sizeof(MessageHeader);
      available -= sizeof(MessageHeader);
      message.moved = sizeof(MessageHeader);
    }
    const size_t payload_moved = message.moved - sizeof(MessageHeader);
    const size_t part = std::min({available, message.header.bytes - payload_moved, kPublishBytes});
    if (part == 0 && payload_moved < message.header.bytes) break;
    in_->read(tail, message.data + payload_moved, part, ring_bytes_);
    tail += part;
    message.moved += part;
    in_->tail.store(tail, std::memory_order_release);
    moved = true;
    if (message.moved == sizeof(MessageHeader) + message.header.bytes) {
      message.request->done.store(true, std::memory_order_release);
      recvs_.pop();
    }
    ring(*peer_doorbell_);
  }
  in_->tail.store(tail, std::memory_order_release);
  return moved;
}

void ShmChannel::cancel() {
  sends_.clear();
  recvs_.clear();
}

void* ShmChannel::resolve(const Address& address, size_t bytes) { return peer_memory_->map(address, bytes); }

}  // namespace bagua

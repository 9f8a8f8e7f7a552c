// Pieces on their way between a device and the channel underneath; see pinned_channel.h.
#include "csrc/transport/pinned/pinned_channel.h"

#include <algorithm>

namespace bagua {

bool PinnedChannel::Direction::is_in(Buffer::State state) const {
  return std::any_of(buffers.begin(), buffers.end(), [state](const Buffer& buffer) { return buffer.state == state; });
}

PinnedChannel::Buffer& PinnedChannel::Direction::begin_piece() {
  Message& message = messages.front();
  const Device where = message.request->stream.device;
  if (memory == nullptr) {
    memory = device::runtime_of(where).allocate_pinned(kNumBuffers * kPieceBytes);
    device = where;
    for (size_t i = 0; i < kNumBuffers; ++i) buffers[i].memory = static_cast<uint8_t*>(memory) + i * kPieceBytes;
  }
  Buffer& buffer = used(num_used++);
  if (!buffer.copied || buffer.copied->device() != where) buffer.copied = std::make_unique<device::OwnedEvent>(where);
  buffer.operation = message.operation;
  buffer.data = message.data + message.begun;
  buffer.bytes = std::min(kPieceBytes, message.bytes - message.begun);
  buffer.message = message.request;
  buffer.on_host.peer = message.request->peer;
  buffer.on_host.done.store(false, std::memory_order_relaxed);
  message.begun += buffer.bytes;
  buffer.is_last = message.begun == message.bytes;
  if (buffer.is_last) messages.pop_front();
  return buffer;
}

void PinnedChannel::Direction::free_oldest() {
  used(0).state = Buffer::State::kFree;
  oldest = (oldest + 1) % kNumBuffers;
  --num_used;
}

// After it no copy touches a buffer or the memory of a message, unless the device hangs or has failed.
void PinnedChannel::Direction::wait_for_copies() {
  const Deadline limit = Deadline::after(device::kLongestWork);
  for (Buffer& buffer : buffers) {
    if (buffer.state != Buffer::State::kCopyingOut && buffer.state != Buffer::State::kCopyingIn) continue;
    if (!device::is_done_by(limit, *buffer.copied)) are_abandoned = true;
  }
}

PinnedChannel::Direction::~Direction() {
  wait_for_copies();
  if (memory != nullptr && !are_abandoned) device::runtime_of(device).free_pinned(memory);
}

void PinnedChannel::post_send(const Operation& operation, const void* data, size_t bytes, Request* request) {
  // const_cast: the copy reads from it.
  out_.messages.push_back({operation, static_cast<uint8_t*>(const_cast<void*>(data)), bytes, request});
  begin_sends();
}

void PinnedChannel::post_recv(const Operation& operation, void* data, size_t bytes, Request* request) {
  in_.messages.push_back({operation, static_cast<uint8_t*>(data), bytes, request});
  begin_receives();
}

bool PinnedChannel::begin_sends() {
  bool begun = false;
  while (!out_.messages.empty()) {
    const Message& message = out_.messages.front();
    if (message.is_passed_on()) {
      if (out_.is_in(Buffer::State::kCopyingOut)) break;  // which go first
      host_.post_send(message.operation, message.data, message.bytes, message.request);
      out_.messages.pop_front();
    } else {
      if (!out_.has_free()) break;
      const Stream stream = message.request->stream;
      Buffer& buffer = out_.begin_piece();
      device::runtime_of(stream.device).copy_to_host(buffer.memory, buffer.data, buffer.bytes, stream);
      buffer.copied->record(stream);
      buffer.state = Buffer::State::kCopyingOut;
    }
    begun = true;
  }
  return begun;
}

bool PinnedChannel::advance_sends() {
  bool moved = false;
  for (size_t i = 0; i < out_.num_used; ++i) {
    Buffer& buffer = out_.used(i);
    if (buffer.state != Buffer::State::kCopyingOut) continue;
    if (!buffer.copied->is_done()) break;
    host_.post_send(buffer.operation, buffer.memory, buffer.bytes, &buffer.on_host);
    buffer.state = Buffer::State::kSending;
    moved = true;
  }
  while (out_.num_used > 0) {
    Buffer& buffer = out_.used(0);
    if (buffer.state != Buffer::State::kSending || !buffer.on_host.done.load(std::memory_order_acquire)) break;
    if (buffer.is_last) buffer.message->done.store(true, std::memory_order_release);
    out_.free_oldest();
    moved = true;
  }
  return moved;
}

bool PinnedChannel::begin_receives() {
  bool begun = false;
  while (!in_.messages.empty()) {
    const Message& message = in_.messages.front();
    if (message.is_passed_on()) {
      host_.post_recv(message.operation, message.data, message.bytes, message.request);
      in_.messages.pop_front();
    } else {
      if (!in_.has_free()) break;
      Buffer& buffer = in_.begin_piece();
      buffer.state = Buffer::State::kReceiving;
      host_.post_recv(buffer.operation, buffer.memory, buffer.bytes, &buffer.on_host);
    }
    begun = true;
  }
  return begun;
}

bool PinnedChannel::advance_receives() {
  bool moved = false;
  for (size_t i = 0; i < in_.num_used; ++i) {
    Buffer& buffer = in_.used(i);
    if (buffer.state != Buffer::State::kReceiving) continue;
    if (!buffer.on_host.done.load(std::memory_order_acquire)) break;
    const Stream stream = buffer.message->stream;
    device::runtime_of(stream.device).copy_from_host(buffer.data, buffer.memory, buffer.bytes, stream);
    buffer.copied->record(stream);
    buffer.state = Buffer::State::kCopyingIn;
    if (buffer.is_last) buffer.message->done.store(true, std::memory_order_release);
    moved = true;
  }
  while (in_.num_used > 0 && in_.used(0).state == Buffer::State::kCopyingIn && in_.used(0).copied->is_done()) {
    in_.free_oldest();
    moved = true;
  }
  return moved;
}

bool PinnedChannel::progress() {
  bool moved = advance_sends();
  moved = begin_sends() || moved;
  moved = host_.progress() || moved;
  moved = advance_receives() || moved;
  return begin_receives() || moved;
}

bool PinnedChannel::is_polled() const {
  return out_.is_in(Buffer::State::kCopyingOut) || (!in_.messages.empty() && in_.is_in(Buffer::State::kCopyingIn)) ||
         host_.is_polled();
}

void PinnedChannel::cancel() {
  host_.cancel();
  for (Direction* direction : {&out_, &in_}) {
    direction->messages.clear();
    direction->wait_for_copies();
    while (direction->num_used > 0) direction->free_oldest();
  }
}

}  // namespace bagua

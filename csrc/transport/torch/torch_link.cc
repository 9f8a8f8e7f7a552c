// Cutting messages into frames and putting them together again; see torch_link.h.
#include "csrc/transport/torch/torch_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bagua {
namespace {

constexpr size_t kInlineBytes = TorchLink::kHeadBytes - sizeof(MessageHeader);

uint64_t inline_bytes(const MessageHeader& header) { return std::min<uint64_t>(header.bytes, kInlineBytes); }

// The size of the frame behind the head that begins at payload byte `moved`.
uint64_t frame_bytes(const MessageHeader& header, uint64_t moved) {
  return std::min<uint64_t>(header.bytes - moved, TorchLink::kFrameBytes);
}

// The smallest size that holds as much.
int size_for(uint64_t bytes) {
  int size = 0;
  while (frame_size_bytes(size) < bytes) ++size;
  return size;
}

// Either pointer may be null when there is nothing to copy, which memcpy does not allow.
void copy(uint8_t* to, const uint8_t* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void TorchLink::post_send(const MessageHeader& header, const uint8_t* data, Request* request) {
  post(out_, header, const_cast<uint8_t*>(data), request);  // const_cast: sends only read through the pointer
}

void TorchLink::post_recv(const MessageHeader& header, uint8_t* data, Request* request) {
  post(in_, header, data, request);
}

void TorchLink::post(Direction& direction, const MessageHeader& header, uint8_t* data, Request* request) {
  {
    std::lock_guard lock(direction.mutex);
    if (direction.has_ended) return;  // it is never done; whoever waits finds the cause or its deadline
    Message message;
    message.header = header;
    message.data = data;
    message.request = request;
    direction.messages.push(message);
  }
  direction.changed.notify_one();
}

void TorchLink::throw_if_failed() {
  if (!has_failed_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  throw Error(*failure_);
}

void TorchLink::end() {
  for (Direction* direction : {&out_, &in_}) {
    {
      std::lock_guard lock(direction->mutex);
      direction->messages.clear();
      if (direction == &out_) leaving_.clear();
      direction->has_ended = true;
    }
    direction->changed.notify_all();
  }
  std::lock_guard lock(mutex_);
  doorbell_ = nullptr;
}

// ---- sending

int TorchLink::take(uint8_t* frame, bool block) {
  std::unique_lock lock(out_.mutex);
  if (block) out_.changed.wait(lock, [this] { return out_.has_ended || !out_.messages.empty(); });
  if (out_.has_ended) return kEnded;
  if (out_.messages.empty()) return kNone;
  Message& message = out_.messages.front();
  uint64_t bytes, used = 0;
  if (!message.is_head_moved) {
    message.is_head_moved = true;
    std::memcpy(frame, &message.header, sizeof(MessageHeader));
    bytes = inline_bytes(message.header);
    used = sizeof(MessageHeader);
  } else {
    bytes = frame_bytes(message.header, message.moved);
  }
  copy(frame + used, message.data + message.moved, bytes);
  message.moved += bytes;
  used += bytes;
  const int size = size_for(used);
  // Padding is zeros: what the forwarder's memory held before is no rank's business.
  std::memset(frame + used, 0, frame_size_bytes(size) - used);
  Request* request = nullptr;
  if (message.moved == message.header.bytes) {
    request = message.request;
    if (message.header.operation.kind == OperationKind::kPointToPoint) complete(std::exchange(request, nullptr));
    out_.messages.pop();
  }
  leaving_.push({request, std::chrono::steady_clock::now()});
  return size;
}

void TorchLink::sent() {
  std::lock_guard lock(out_.mutex);
  if (leaving_.empty()) return;  // the link has ended meanwhile
  Request* request = leaving_.front().request;
  leaving_.pop();
  if (request != nullptr) complete(request);
}

bool TorchLink::complete_overdue() {
  const std::unique_lock lock(out_.mutex, std::try_to_lock);
  if (!lock || leaving_.empty()) return false;  // being copied just now, so not overdue
  const auto limit = std::chrono::steady_clock::now() - kPatience;
  bool found = false;
  for (size_t i = 0; i < leaving_.size() && leaving_[i].since < limit; ++i) {
    if (Request* request = std::exchange(leaving_[i].request, nullptr)) {
      complete(request);
      found = true;
    }
  }
  return found;
}

bool TorchLink::has_unsent() {
  std::lock_guard lock(out_.mutex);
  return !out_.has_ended && !has_failed_.load(std::memory_order_acquire) &&
         (!leaving_.empty() || !out_.messages.empty());
}

// ---- receiving

int TorchLink::expect(bool block) {
  std::unique_lock lock(in_.mutex);
  if (block) in_.changed.wait(lock, [this] { return in_.has_ended || num_expected_ < in_.messages.size(); });
  if (in_.has_ended) return kEnded;
  if (num_expected_ == in_.messages.size()) return kNone;
  Message& message = in_.messages[num_expected_];
  uint64_t bytes;
  int size = 0;
  if (!message.is_head_expected) {
    message.is_head_expected = true;
    bytes = inline_bytes(message.header);
  } else {
    bytes = frame_bytes(message.header, message.expected);
    size = size_for(bytes);
  }
  message.expected += bytes;
  if (message.expected == message.header.bytes) ++num_expected_;
  return size;
}

void TorchLink::deliver(const uint8_t* frame) {
  std::lock_guard lock(in_.mutex);
  if (in_.has_ended) return;
  Message& message = in_.messages.front();
  uint64_t bytes;
  if (!message.is_head_moved) {
    if (!check_head(message, frame)) return;
    frame += sizeof(MessageHeader);
    bytes = inline_bytes(message.header);
  } else {
    bytes = frame_bytes(message.header, message.moved);
  }
  copy(message.data + message.moved, frame, bytes);
  message.moved += bytes;
  if (message.moved != message.header.bytes) return;
  --num_expected_;
  Request* request = message.request;
  in_.messages.pop();
  complete(request);
}

// False when the peer's message is not the one that was posted; then nothing more is received.
bool TorchLink::check_head(Message& message, const uint8_t* frame) {
  MessageHeader received;
  std::memcpy(&received, frame, sizeof received);
  try {
    check_header(received, message.header, peer_);
  } catch (const Error& error) {
    in_.has_ended = true;
    fail(error);
    return false;
  }
  message.is_head_moved = true;
  return true;
}

// ---- both

void TorchLink::complete(Request* request) {
  request->done.store(true, std::memory_order_release);  // from here on the request may be destroyed
  ring();
}

void TorchLink::fail(const Error& cause) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  has_failed_.store(true, std::memory_order_release);
  ring();
}

void TorchLink::ring() {
  std::lock_guard lock(mutex_);
  if (doorbell_ != nullptr) doorbell_->ring();
}

}  // namespace bagua

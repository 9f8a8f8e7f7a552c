// Splitting messages over streams; see tcp_channel.h.
#include "csrc/transport/tcp/tcp_channel.h"

#include <algorithm>

namespace bagua {
namespace {

// Below this a split costs more system calls than it gains.
constexpr size_t kMinSplitBytes = 128 << 10;

}  // namespace

TcpChannel::TcpChannel(int peer, const std::vector<int>& fds, Doorbell& doorbell) {
  for (int fd : fds) streams_.push_back(std::make_unique<TcpStream>(fd, peer, doorbell));
}

template <typename Function>
void TcpChannel::split(size_t bytes, uint64_t turn, Request* request, Function part) {
  const size_t count = streams_.size();
  if (bytes < kMinSplitBytes || count == 1) {
    request->remaining.store(1, std::memory_order_relaxed);
    part(*streams_[turn % count], 0, bytes);
    return;
  }
  request->remaining.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
  const size_t share = (bytes / count + 63) / 64 * 64;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = std::min(bytes, i * share);
    const size_t end = i + 1 == count ? bytes : std::min(bytes, begin + share);
    part(*streams_[i], begin, end - begin);
  }
}

void TcpChannel::post_send(const Operation& operation, const void* data, size_t bytes, Request* request) {
  const MessageHeader header{operation, bytes};
  const auto* from = static_cast<const uint8_t*>(data);
  split(bytes, num_sent_++, request, [&](TcpStream& stream, size_t offset, size_t part_bytes) {
    stream.post_send(header, from + offset, part_bytes, request);
  });
}

void TcpChannel::post_recv(const Operation& operation, void* data, size_t bytes, Request* request) {
  const MessageHeader header{operation, bytes};
  auto* into = static_cast<uint8_t*>(data);
  split(bytes, num_received_++, request, [&](TcpStream& stream, size_t offset, size_t part_bytes) {
    stream.post_recv(header, into + offset, part_bytes, request);
  });
}

bool TcpChannel::progress() {
  for (auto& stream : streams_) stream->throw_if_failed();
  return false;  // the reactor moves the bytes
}

void TcpChannel::cancel() {
  for (auto& stream : streams_) stream->cancel();
}

}  // namespace bagua

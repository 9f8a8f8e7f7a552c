// A frame of a process link as it lies on the wire (process_link.h), written down from its description.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "csrc/communicator/process_link.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {

inline Bytes frame(FrameType type, const Bytes& payload, const std::string& group = "test") {
  const auto group_bytes = static_cast<uint16_t>(group.size());
  const auto size = static_cast<uint32_t>(2 + group.size() + payload.size());
  Bytes bytes(8 + size);
  std::memcpy(bytes.data(), &type, 4);
  std::memcpy(bytes.data() + 4, &size, 4);
  std::memcpy(bytes.data() + 8, &group_bytes, 2);
  std::memcpy(bytes.data() + 10, group.data(), group.size());
  if (!payload.empty()) std::memcpy(bytes.data() + 10 + group.size(), payload.data(), payload.size());
  return bytes;
}

template <typename Pod>
Bytes bytes_of(const Pod& pod) {
  Bytes bytes(sizeof pod);
  std::memcpy(bytes.data(), &pod, sizeof pod);
  return bytes;
}

// The frames that have come to the bare end of a link, as types and payloads; it stays there unless it is taken.
// Senders write whole frames, and to an end that is read in time.
inline std::vector<std::pair<FrameType, Bytes>> frames_at(int peer, bool takes = false) {
  Bytes bytes(1 << 16);
  const ssize_t got = recv(peer, bytes.data(), bytes.size(), MSG_DONTWAIT | (takes ? 0 : MSG_PEEK));
  std::vector<std::pair<FrameType, Bytes>> frames;
  for (size_t at = 0; at + 10 <= static_cast<size_t>(std::max<ssize_t>(got, 0));) {
    uint32_t header[2];
    uint16_t group_bytes;
    std::memcpy(header, bytes.data() + at, sizeof header);
    std::memcpy(&group_bytes, bytes.data() + at + 8, sizeof group_bytes);
    const auto begin = bytes.begin() + static_cast<long>(at);
    frames.emplace_back(static_cast<FrameType>(header[0]), Bytes(begin + 10 + group_bytes, begin + 8 + header[1]));
    at += 8 + header[1];
  }
  return frames;
}

}  // namespace bagua::testing

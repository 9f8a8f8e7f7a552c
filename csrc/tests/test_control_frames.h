// A frame of a process link as it lies on the wire (process_link.h), written down from its description.
#pragma once

#include <cstring>
#include <string>

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

}  // namespace bagua::testing

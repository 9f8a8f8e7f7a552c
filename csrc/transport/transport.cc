// Check of a message against what is expected; see transport.h.
#include "csrc/transport/transport.h"

#include <string>

namespace bagua {

void check_header(const MessageHeader& received, const MessageHeader& expected, int peer) {
  if (received.operation != expected.operation) throw_mismatch(received.operation, expected.operation, peer);
  if (received.bytes == expected.bytes) return;
  throw_disagreement("in " + describe(expected.operation) + " rank " + std::to_string(peer) + " sent " +
                         std::to_string(received.bytes) + " bytes where this rank expected " +
                         std::to_string(expected.bytes),
                     expected.operation, peer);
}

}  // namespace bagua

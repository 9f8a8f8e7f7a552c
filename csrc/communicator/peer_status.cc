// Comparison of two ranks' operations; see peer_status.h.
#include "csrc/communicator/peer_status.h"

namespace bagua {

void check_status(const PeerStatus& theirs, const PeerStatus& mine, int peer) {
  for (const Operation& own : {mine.operation, mine.last_finished}) {
    if (own.sequence == 0) continue;  // idle, or point-to-point, where ranks have no common order
    for (const Operation& other : {theirs.operation, theirs.last_finished}) {
      if (other.sequence == own.sequence && other != own) throw_mismatch(other, own, peer);
    }
  }
}

}  // namespace bagua

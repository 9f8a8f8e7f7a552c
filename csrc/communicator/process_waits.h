// ProcessWaits: what the groups of one process know for one another. A rank that is kept waiting in one group may be
// kept by a peer that itself waits in another one, or that leaves because another one has failed.
//
// Beside the data path: asked on the reactor thread, and when a group fails or closes. The lock here is taken before a
// communicator's own, never after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/communicator/peer_status.h"

namespace bagua {

class Communicator;

class ProcessWaits {
 public:
  // A communicator is there from add() to remove(), which it calls before it closes. [any thread]
  void add(Communicator* communicator);
  void remove(Communicator* communicator);

  // The longest of the waits, in other groups than `asked`, for which a thread of the program stands still.
  struct Wait {
    uint32_t waited_ms = 0;
    Operation operation;  // kNone: a message
    std::string group;
    ChainEnd end;

    void write_to(PeerStatus& status) const;
  };
  std::optional<Wait> longest_except(const Communicator* asked);
  // The answer to who asks about a group that is not there (yet, or any more); asks along the waits too.
  PeerStatus status(PeerStatus::Group group);
  // Asks along all of them (Communicator::forward_request).
  void forward_request_except(const Communicator* asked, uint32_t hops);

  // Why a group of this process has failed; `cause.rank()` is the job's. Forgotten when the program goes on.
  void note_failure(const Error& cause);
  std::optional<Error> failure();
  void forget_failure() {
    if (has_failed_.load(std::memory_order_relaxed)) forget();
  }

 private:
  void forget();

  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;  // guards the two below, and keeps the communicators alive while they are asked
  std::vector<Communicator*> communicators_;
  std::optional<Error> failure_;
};

}  // namespace bagua

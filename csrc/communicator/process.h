// Process: this process among those of the job: its links to the others, its groups, and what the groups know for one
// another. A rank that is kept waiting in one group may be kept by a peer that itself waits in another one, or that
// leaves because another one has failed. It answers peers that ask about a group that is not here (yet, or any more).
//
// Locks: registry_mutex_, then a link's, then mutex_, then a group's own. The reactor thread never takes the
// first.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/common/fork_guard.h"
#include "csrc/communicator/closed_groups.h"
#include "csrc/communicator/peer_status.h"
#include "csrc/communicator/process_link.h"

namespace bagua {

class Liveness;

class Process {
 public:
  // `heartbeat_timeout`: within which a peer that cannot be heard any more is named.
  // Throws TransportError where no descriptor is left; then none is needed for links.
  explicit Process(std::chrono::milliseconds heartbeat_timeout = std::chrono::seconds(10));
  ~Process();

  // Takes ownership of a connected and authenticated stream socket to a rank of the job. Throws TransportError where
  // there is a link to it already, which goes on.
  void attach(int job_rank, int fd);
  bool is_linked(int job_rank);
  bool had_link(int job_rank);  // or has one
  // Says goodbye on all links and ends them; after the groups were closed. Idempotent.
  void close();

  // A group is there from add() to remove(), which it calls before it closes, with its report of the failure
  // (abort_bytes) if it has failed. It gets the links to its peers, those that are there and those that will be. [any
  // thread]
  void add(Liveness* group);
  void remove(Liveness* group, std::optional<std::vector<uint8_t>> abort);
  // A group that could not be made: its peers that are linked hear the cause now, and those that ask later, as after
  // remove().
  void refuse(const std::string& key, const std::vector<uint8_t>& abort);
  // Whether a group of this key was closed after a failure.
  bool has_failed(const std::string& key);

  // The longest of the waits, in other groups than `asked`, for which a thread of the program stands still.
  struct Wait {
    uint32_t waited_ms = 0;
    Operation operation;  // kNone: a message
    std::string group;
    ChainEnd end;

    void write_to(PeerStatus& status) const;
  };
  std::optional<Wait> longest_except(const Liveness* asked);
  // Returns the answer about a group that is not there; asks along the waits too.
  PeerStatus status(PeerStatus::Group group);
  // Whether this process hears from a rank of the job, as far as one of its groups can tell or find out. [any thread]
  Hearing hearing_of(int job_rank);
  // Asks along all of them (Liveness::forward_request).
  void forward_request_except(const Liveness* asked, uint32_t hops);

  // Why a group of this process has failed; `cause.rank()` is the job's. Forgotten when the program goes on.
  void note_failure(const Error& cause);
  std::optional<Error> failure();
  void forget_failure() {
    if (has_failed_.load(std::memory_order_relaxed)) forget();
  }

 private:
  bool is_linked_locked(int job_rank) const;
  void forget();
  void answer_unrouted(ProcessLink& link, FrameType type, const std::string& key, size_t bytes);

  const uint32_t generation_ = process_generation();
  const ProcessLink::Pace pace_;
  std::shared_ptr<Reactor> reactor_;  // so that no link fails for want of its descriptors
  std::atomic<bool> has_failed_{false};

  std::mutex registry_mutex_;                          // guards links_, and that a group gets each link once
  std::map<int, std::shared_ptr<ProcessLink>> links_;  // by rank of the job

  std::mutex mutex_;  // guards what follows, and keeps the groups alive while they are asked
  std::vector<Liveness*> groups_;
  std::optional<Error> failure_;
  ClosedGroups closed_{1000};
};

}  // namespace bagua

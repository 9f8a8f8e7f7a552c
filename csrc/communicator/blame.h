// Whom to name for a wait that took too long, judged by what peers have answered. Pure functions.
//
// Ranks wait for one another in chains: the peer that keeps this rank waiting may itself be kept waiting, in an earlier
// operation, for a message, in another group. So the request travels along the chain: who is asked asks in turn whom
// it waits for, and every answer says where the chain ends as far as it is known. The rank at the end is to blame: it
// is there and waits for no rank, or it does not answer who waits for it. In the latter case its host may acknowledge
// what is sent to it (its process is stopped) or not (the host is down, or the cable is cut, which only others can
// tell). What is known from before the request does not count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/common/operation.h"
#include "csrc/communicator/peer_status.h"

namespace bagua {

// This rank among those of its group, and their ranks in the job.
struct GroupRanks {
  int rank = 0;
  int size = 0;
  std::string group;           // its name
  std::vector<int> job_ranks;  // by rank of the group; empty: the same

  int job_rank(int group_rank) const {
    const auto index = static_cast<size_t>(group_rank);
    return index < job_ranks.size() ? job_ranks[index] : group_rank;
  }
  int group_rank(int job_rank) const;             // -1: none of the group's
  std::string describe_rank(int job_rank) const;  // "rank 3", "rank 17 of the job"
};

struct Verdict {
  int culprit = -1;  // a rank of the group; -1: no rank is named
  bool is_final = false;
  std::string what;
  int unreachable = -1;  // a rank whose host may be down, or the connection to it cut; others may know
  int witness = -1;      // a rank of the job: who does not reach it
};

// The time for which an answer may be awaited, and answers that come along a chain.
constexpr double answer_grace_seconds(double allowed_seconds) { return std::clamp(0.2 * allowed_seconds, 0.3, 2.0); }
constexpr double chain_grace_seconds(double allowed_seconds) { return std::clamp(0.4 * allowed_seconds, 0.3, 5.0); }

// Returns the end of a chain that ends with a peer, whatever keeps it from what this rank waits for.
ChainEnd end_at(const GroupRanks& ranks, int peer, const PeerStatus& theirs);

// Judges by what a peer that keeps this rank waiting has answered, `age_ms` ago, to a rank that has asked for
// `asking_ms`.
Verdict judge_answer(const GroupRanks& ranks, const Operation& mine, int peer, const PeerStatus& theirs,
                     uint32_t age_ms, uint32_t asking_ms, double allowed_seconds);
// Judges by the end of a chain. `before` is said of the chain that leads there, and `elsewhere` is where its end waits,
// if that is known.
Verdict judge_end(const GroupRanks& ranks, const ChainEnd& end, const std::string& before = "",
                  const std::string& elsewhere = "");

// The losses among the ranks of a group: which rank is lost to which, as far as a rank knows. Both sets only grow, and
// every rank that has failed tells them to those that it is linked to whenever they do: so ranks between which there is
// a way over links come to have the same ones, in whatever order they hear of it.
struct Losses {
  std::set<int> lost;   // to some rank: its link has ended and it had not left, or nothing comes from its host
  std::set<int> there;  // of those: has told another rank what it failed with, so it is the connection that is lost

  // Those of others; what is none of the `size` ranks of the group is dropped. Whether anything is new.
  bool add(const Losses& others, int size);
  std::vector<int> dead() const;  // in order
  bool operator==(const Losses&) const = default;
};

// Whether a cause that `teller` tells is its own fault: whoever names itself, or has failed without naming anybody. Not
// by a deadline or a connection: then no rank is at fault; nor by what others have told.
bool is_own_fault(const Error& cause, int teller);

}  // namespace bagua

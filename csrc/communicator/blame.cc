// The verdicts, in words; see blame.h.
#include "csrc/communicator/blame.h"

#include <algorithm>
#include <iterator>

namespace bagua {
namespace {

// Describes a rank that waits: one that waits for a message has no operation.
std::string waiting_text(const Operation& operation) {
  return operation.kind == OperationKind::kNone ? "a send or recv" : describe(operation);
}

// "barrier #3 of group 'world'"; empty for who waits nowhere else.
std::string elsewhere_text(const PeerStatus& theirs) {
  if (theirs.elsewhere_ms == 0) return "";
  const auto& name = theirs.elsewhere_group;
  const std::string group(name.begin(), std::find(name.begin(), name.end(), '\0'));
  return waiting_text(theirs.elsewhere) + " of group '" + group + "'";
}

}  // namespace

int GroupRanks::group_rank(int job_rank) const {
  if (job_ranks.empty()) return job_rank;
  const auto found = std::find(job_ranks.begin(), job_ranks.end(), job_rank);
  return found == job_ranks.end() ? -1 : static_cast<int>(found - job_ranks.begin());
}

std::string GroupRanks::describe_rank(int job_rank) const {
  const int rank = group_rank(job_rank);
  return rank >= 0 ? "rank " + std::to_string(rank) : "rank " + std::to_string(job_rank) + " of the job";
}

bool Losses::add(const Losses& others, int size) {
  const size_t before = lost.size() + there.size();
  const auto add_all = [size](const std::set<int>& from, std::set<int>& to) {
    to.insert(from.lower_bound(0), from.lower_bound(size));
  };
  add_all(others.lost, lost);
  add_all(others.there, there);
  return lost.size() + there.size() > before;
}

std::vector<int> Losses::dead() const {
  std::vector<int> dead;
  std::set_difference(lost.begin(), lost.end(), there.begin(), there.end(), std::back_inserter(dead));
  return dead;
}

bool is_own_fault(const Error& cause, int teller) {
  if (cause.kind() == ErrorKind::kRemote) return false;
  if (cause.rank() >= 0) return cause.rank() == teller;
  return cause.kind() != ErrorKind::kDeadlineExceeded && cause.kind() != ErrorKind::kTransport;
}

ChainEnd end_at(const GroupRanks& ranks, int peer, const PeerStatus& theirs) {
  ChainEnd end;
  end.rank = ranks.job_rank(peer);
  end.witness = ranks.job_rank(ranks.rank);
  end.state = theirs.group == PeerStatus::kHasMade   ? ChainEnd::kIsNotWaiting
              : theirs.group == PeerStatus::kHasLeft ? ChainEnd::kHasLeftGroup
                                                     : ChainEnd::kHasNoGroup;
  end.operation = theirs.operation;
  end.last_finished = theirs.last_finished;
  return end;
}

Verdict judge_answer(const GroupRanks& ranks, const Operation& mine, int peer, const PeerStatus& theirs,
                     uint32_t age_ms, uint32_t asking_ms, double allowed_seconds) {
  const std::string who = "rank " + std::to_string(peer);
  const int me = ranks.job_rank(ranks.rank);
  if (theirs.waiting_for == ranks.rank) {
    const bool is_same = theirs.operation == mine;
    return {-1, true,
            who + " waits for this rank in turn" + (is_same ? "" : ", in " + waiting_text(theirs.operation)) +
                ": both are there, and what one waits for the other has not sent, or it is still on its way"};
  }
  ChainEnd end = theirs.end;
  const int theirs_rank = ranks.job_rank(peer);
  const bool is_elsewhere = theirs.elsewhere_ms > 0;
  // A thread that stands still in another group does not excuse a rank that was late before, unless it stands there for
  // one that does not answer; nor one that stands there for this rank, which did call.
  const bool is_circle = end.rank == me || end.rank == theirs_rank;
  const auto is_there = [&] {
    return end.state == ChainEnd::kIsNotWaiting || end.state == ChainEnd::kHasNoGroup ||
           end.state == ChainEnd::kHasLeftGroup;
  };
  const bool was_late = is_there() && theirs.elsewhere_ms < 500 * allowed_seconds;
  if (is_elsewhere && (is_circle || was_late)) end = end_at(ranks, peer, theirs);
  std::string chain;
  if (end.rank != theirs_rank) {
    chain = who + (is_elsewhere ? " has not called it: it waits in another group" : " waits");
    const int next = is_elsewhere ? end.rank : ranks.job_rank(theirs.waiting_for);
    chain += " for " + ranks.describe_rank(next);
    if (end.rank != next) chain += ", and in the end for " + ranks.describe_rank(end.rank);
    chain += "; ";
  }
  const bool is_fresh = end.age_ms + age_ms <= asking_ms;
  const bool is_known =
      is_there() || (end.state != ChainEnd::kUnknown && end.silent_ms >= 1000 * answer_grace_seconds(allowed_seconds));
  if (!is_fresh || !is_known) return {-1, false, chain + "why is not known"};
  if (end.rank == me && end.state == ChainEnd::kIsNotWaiting) {
    return {-1, true, chain + "so the ranks wait for one another in a circle"};
  }
  return judge_end(ranks, end, chain, end.rank == theirs_rank ? elsewhere_text(theirs) : "");
}

Verdict judge_end(const GroupRanks& ranks, const ChainEnd& end, const std::string& before,
                  const std::string& elsewhere) {
  const std::string who = ranks.describe_rank(end.rank);
  const int culprit = ranks.group_rank(end.rank);
  switch (end.state) {
    case ChainEnd::kIsNotWaiting: {
      const std::string last = end.last_finished.kind == OperationKind::kNone
                                   ? "it has finished none before"
                                   : "its last was " + describe(end.last_finished);
      if (end.operation.kind != OperationKind::kNone) {
        return {culprit, true, before + who + " is in " + describe(end.operation) + ", " + last};
      }
      return {culprit, true,
              before + who + " has not called it; " + last + ", and it is " +
                  (elsewhere.empty() ? "not in a collective" : "in " + elsewhere) + " now"};
    }
    case ChainEnd::kHasNoGroup:
    case ChainEnd::kHasLeftGroup: {
      const bool has_left = end.state == ChainEnd::kHasLeftGroup;
      const std::string group = end.witness == ranks.job_rank(ranks.rank)
                                    ? "the group '" + ranks.group + "'"
                                    : "the group in which " + ranks.describe_rank(end.witness) + " waits for it";
      return {culprit, true,
              before + who + (has_left ? " has destroyed " : " has not made ") + group +
                  (elsewhere.empty() ? "" : ", and is in " + elsewhere + " now") +
                  (has_left ? "; destroy a group only when all its ranks have finished with it"
                            : "; all ranks call new_group, in the same order")};
    }
    case ChainEnd::kDoesNotAnswer:
      if (end.rank == ranks.job_rank(ranks.rank)) break;  // the witness's requests get lost on their way to this rank
      return {culprit, true, before + who + " does not answer: its process is stopped or its host is unreachable"};
    case ChainEnd::kUnreachable:
    case ChainEnd::kUnknown: break;
  }
  return {-1, true,
          before + "the connection between " + ranks.describe_rank(end.witness) + " and " + who +
              " is silent: nothing that is sent over it arrives (the link is cut, or a host is down)",
          end.rank == ranks.job_rank(ranks.rank) ? -1 : culprit, end.witness};
}

}  // namespace bagua

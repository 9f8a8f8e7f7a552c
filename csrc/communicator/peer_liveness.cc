// Whether peers are alive, and whom to name when one is not or is late; see communicator.h.
//
// A process that dies is noticed at once: its control link ends without its having left (listen). Everything else takes
// a request for the peer's status, sent by who has waited for long, and again when its deadline has passed.
//
// Ranks wait for one another in chains: the peer that keeps this rank waiting may itself be kept waiting, in an earlier
// operation, for a message, in another group. So the request travels along the chain: who is asked asks in turn whom
// it waits for, and every answer says where the chain ends as far as it is known. The rank at the end is to blame: it
// is there and waits for nobody, or it does not answer who waits for it. In the latter case its host may acknowledge
// what is sent to it (its process is stopped) or not (the host is down, or the cable is cut, which only others can
// tell). What is known from before the request does not count.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "csrc/communicator/communicator.h"
#include "csrc/communicator/control_link.h"

namespace bagua {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// A rank that has not answered for so long counts as silent, and one that has answered since as there. Above what a
// host may delay an acknowledgement.
constexpr milliseconds kSilence{300};
// How often who wants to know asks. Who forwards requests drops some, or they would go round in circles of ranks
// ever faster.
constexpr milliseconds kRequestInterval{50};
constexpr milliseconds kMinRequestInterval{20};

nanoseconds seconds(double value) { return nanoseconds(static_cast<int64_t>(value * 1e9)); }

uint32_t milliseconds_in(nanoseconds time) {
  return static_cast<uint32_t>(std::clamp<int64_t>(duration_cast<milliseconds>(time).count(), 0, INT32_MAX));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

// "barrier #3 of group 'world'"; empty for who waits nowhere else.
std::string elsewhere_text(const PeerStatus& theirs) {
  if (theirs.elsewhere_ms == 0) return "";
  const auto& name = theirs.elsewhere_group;
  const std::string group(name.begin(), std::find(name.begin(), name.end(), '\0'));
  const bool is_message = theirs.elsewhere.kind == OperationKind::kNone;
  return (is_message ? "a send or recv" : describe(theirs.elsewhere)) + " of group '" + group + "'";
}

}  // namespace

// ---- what a peer's control link tells

void Communicator::listen(int peer, ControlLink& control) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  ControlLink::Events events;
  events.on_abort = [this, peer](const Error& cause) {
    if (cause.kind() == ErrorKind::kRemote) {
      poison(cause);
    } else {
      // Who failed without naming anybody is to blame, except for a deadline: then nobody is.
      const bool names = cause.rank() >= 0 || cause.kind() == ErrorKind::kDeadlineExceeded;
      poison(Error(ErrorKind::kRemote, "rank " + std::to_string(peer) + " reported: " + cause.what(),
                   names ? cause.rank() : peer, cause.operation()));
    }
  };
  events.on_failure = [this](const Error& cause) { poison(cause); };
  events.on_lost = [this, peer](const std::string& how) {
    poison(Error(ErrorKind::kTransport,
                 "rank " + std::to_string(peer) + " " + how +
                     " without leaving the group: its process died or the network between the hosts failed; see the "
                     "log of rank " +
                     std::to_string(peer),
                 peer, std::string(operation_name(status().operation.kind))));
  };
  events.on_leave = [this, &p](const std::optional<Error>& why) {
    {
      std::lock_guard lock(mutex_);
      p.why_left = why;
    }
    p.departed.store(true, std::memory_order_release);
    doorbell_->ring();
  };
  events.on_status = [this, peer](const PeerStatus& status) {
    keep_answer(peer, status);
    doorbell_->ring();
  };
  events.my_status = [this](const StatusRequest& request) { return answer(request); };
  events.on_segment = [this] { doorbell_->ring(); };
  events.on_released = [this, &p] {
    std::lock_guard lock(mutex_);
    if (status_.operation.kind == OperationKind::kNone) p.control->unmap_released();
  };
  control.start(std::move(events));
}

void Communicator::throw_departed(int peer) {
  std::optional<Error> why;
  {
    std::lock_guard lock(mutex_);
    why = peers_[static_cast<size_t>(peer)]->why_left;
  }
  const std::string left = "rank " + std::to_string(peer) + " left the group '" + name_ +
                           "' while this rank waits for it in " + describe(operation_);
  const std::string operation(operation_name(operation_.kind));
  if (why) throw Error(ErrorKind::kRemote, left + "; before, " + why->what(), group_rank(why->rank()), operation);
  throw Error(ErrorKind::kTransport, left + "; it destroyed the group, ended its program or raised: see its log", peer,
              operation);
}

// ---- who waits for whom: what this rank knows and tells

PeerStatus Communicator::status() const {
  PeerStatus status;
  {
    std::lock_guard lock(mutex_);
    status = status_;
    status.waiting_for = waits_for();
    if (status.waiting_for >= 0) {
      status.end = end_behind_locked(status.waiting_for);
      return status;
    }
  }
  if (status.operation.kind == OperationKind::kNone && process_) {
    if (const auto wait = process_->longest_except(this)) {
      wait->write_to(status);
      return status;
    }
  }
  status.end.rank = status.end.witness = job_rank(rank_);
  status.end.state = ChainEnd::kIsNotWaiting;
  status.end.operation = status.operation;
  status.end.last_finished = status.last_finished;
  return status;
}

ChainEnd Communicator::end_behind_locked(int peer) const {
  const Peer& p = *peers_[static_cast<size_t>(peer)];
  const auto now = Deadline::Clock::now();
  ChainEnd end;
  end.rank = job_rank(peer);
  end.witness = job_rank(rank_);
  if (p.unanswered_since && now - *p.unanswered_since >= kSilence) {
    end.state = p.control && !p.control->reaches_host() ? ChainEnd::kUnreachable : ChainEnd::kDoesNotAnswer;
    end.silent_ms = milliseconds_in(now - *p.unanswered_since);
  } else if (p.answer) {
    end = p.answer->end;
    end.age_ms += milliseconds_in(now - p.answered_at);
  }
  return end;
}

std::optional<ProcessWaits::Wait> Communicator::wait_of_a_thread() const {
  std::lock_guard lock(mutex_);  // an operation that is waited in does not end meanwhile
  const int peer = waits_for();
  const bool stands_still = peer >= 0 && num_waiters_ && num_waiters_->load(std::memory_order_relaxed) > 0;
  if (!stands_still) return std::nullopt;
  const TimePoint since(TimePoint::duration(waiting_since_ns_.load(std::memory_order_relaxed)));
  return ProcessWaits::Wait{milliseconds_in(Deadline::Clock::now() - since), status_.operation, name_,
                            end_behind_locked(peer)};
}

void Communicator::now_awaits_message(int peer) {
  if (waits_for() != peer) now_waiting_for(peer, Deadline::Clock::now());
}

// ---- requests and answers

void Communicator::request_status(int peer, const StatusRequest& request) {
  std::shared_ptr<ControlLink> control;
  {
    std::lock_guard lock(mutex_);
    Peer& p = *peers_[static_cast<size_t>(peer)];
    control = p.control;
    if (!control) return;
    p.last_request = Deadline::Clock::now();
    if (!p.unanswered_since) p.unanswered_since = p.last_request;
  }
  control->request_status(request);
}

void Communicator::note_status_request(int peer) {
  std::lock_guard lock(mutex_);
  Peer& p = *peers_[static_cast<size_t>(peer)];
  if (!p.unanswered_since) p.unanswered_since = Deadline::Clock::now();
}

void Communicator::forward_request(uint32_t hops) {
  if (hops == 0) return;
  const int peer = waits_for();
  if (peer < 0) return;
  {
    std::lock_guard lock(mutex_);
    if (Deadline::Clock::now() - peers_[static_cast<size_t>(peer)]->last_request < kMinRequestInterval) return;
  }
  request_status(peer, {.hops = hops - 1});
}

PeerStatus Communicator::answer(const StatusRequest& request) {
  PeerStatus status = this->status();
  if (request.about >= 0 && request.about < size_ && request.about != rank_) status.hearing = hearing(request.about);
  if (status.waiting_for >= 0) {
    forward_request(request.hops);
  } else if (status.elsewhere_ms > 0) {
    process_->forward_request_except(this, request.hops);
  }
  return status;
}

// By an answer that is not old, or a request that has not been answered for long. Asks, so as to know it next time.
PeerStatus::Hearing Communicator::hearing(int peer) {
  PeerStatus::Hearing hearing = PeerStatus::kNotYetKnown;
  const auto now = Deadline::Clock::now();
  {
    std::lock_guard lock(mutex_);
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    if (!p.control || p.departed.load(std::memory_order_relaxed)) return PeerStatus::kCannotTell;
    if (p.unanswered_since && now - *p.unanswered_since >= kSilence) {
      hearing = PeerStatus::kHearsNothing;
    } else if (p.answer && now - p.answered_at < kSilence) {
      hearing = PeerStatus::kHears;
    }
    if (now - p.last_request < kMinRequestInterval) return hearing;
  }
  request_status(peer);
  return hearing;
}

void Communicator::take_answer(int peer, const PeerStatus& theirs) {
  check_status(theirs, status(), peer);
  PeerStatus answer = theirs;
  if (answer.group != PeerStatus::kHasMade && answer.elsewhere_ms == 0) answer.end = end_at(peer, answer);
  keep_answer(peer, answer);
}

// Of a chain that ends with a peer, whatever keeps it from what this rank waits for.
ChainEnd Communicator::end_at(int peer, const PeerStatus& theirs) const {
  ChainEnd end;
  end.rank = job_rank(peer);
  end.witness = job_rank(rank_);
  end.state = theirs.group == PeerStatus::kHasMade   ? ChainEnd::kIsNotWaiting
              : theirs.group == PeerStatus::kHasLeft ? ChainEnd::kHasLeftGroup
                                                     : ChainEnd::kHasNoGroup;
  end.operation = theirs.operation;
  end.last_finished = theirs.last_finished;
  return end;
}

void Communicator::keep_answer(int peer, const PeerStatus& theirs) {
  std::lock_guard lock(mutex_);
  Peer& p = *peers_[static_cast<size_t>(peer)];
  p.answer = theirs;
  p.answered_at = Deadline::Clock::now();
  p.unanswered_since.reset();
  p.is_unread = true;
}

void Communicator::compare_answer(int peer) {
  std::optional<PeerStatus> answer;
  {
    std::lock_guard lock(mutex_);
    Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.is_unread) answer = p.answer;
    p.is_unread = false;
  }
  if (answer) check_status(*answer, status(), peer);
}

// ---- the verdict

int Communicator::group_rank(int job_rank) const {
  if (job_ranks_.empty()) return job_rank;
  const auto found = std::find(job_ranks_.begin(), job_ranks_.end(), job_rank);
  return found == job_ranks_.end() ? -1 : static_cast<int>(found - job_ranks_.begin());
}

std::string Communicator::name_of(int job_rank) const {
  const int rank = group_rank(job_rank);
  return rank >= 0 ? "rank " + std::to_string(rank) : "rank " + std::to_string(job_rank) + " of the job";
}

Communicator::Verdict Communicator::judge(int peer, TimePoint since, double allowed_seconds) const {
  const auto now = Deadline::Clock::now();
  std::optional<PeerStatus> theirs;
  ChainEnd silent;
  uint32_t age_ms = 0;
  {
    std::lock_guard lock(mutex_);
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.unanswered_since && now - *p.unanswered_since >= seconds(answer_grace_seconds(allowed_seconds))) {
      silent = end_behind_locked(peer);
    } else if (p.answer && p.answered_at >= since) {
      theirs = p.answer;
      age_ms = milliseconds_in(now - p.answered_at);
    }
  }
  if (silent.state != ChainEnd::kUnknown) return judge_end(silent, "", "");
  if (theirs) return judge_answer(peer, *theirs, age_ms, milliseconds_in(now - since), allowed_seconds);
  return {peer, false, "rank " + std::to_string(peer) + " has not answered yet"};
}

Communicator::Verdict Communicator::judge_answer(int peer, const PeerStatus& theirs, uint32_t age_ms,
                                                 uint32_t asking_ms, double allowed_seconds) const {
  const std::string who = "rank " + std::to_string(peer);
  const int me = job_rank(rank_);
  if (theirs.waiting_for == rank_) {
    const bool is_same = theirs.operation == status().operation;
    return {-1, true,
            who + " waits for this rank in turn" + (is_same ? "" : ", in " + describe(theirs.operation)) +
                ": both are there, and what one waits for the other has not sent, or it is still on its way"};
  }
  ChainEnd end = theirs.end;
  const int theirs_rank = job_rank(peer);
  const bool is_elsewhere = theirs.elsewhere_ms > 0;
  // A thread that stands still in another group does not excuse a rank that was late before, unless it stands there for
  // one that does not answer; nor one that stands there for this rank, which did call.
  const bool is_circle = end.rank == me || end.rank == theirs_rank;
  const auto is_there = [&] {
    return end.state == ChainEnd::kIsNotWaiting || end.state == ChainEnd::kHasNoGroup ||
           end.state == ChainEnd::kHasLeftGroup;
  };
  const bool was_late = is_there() && theirs.elsewhere_ms < 500 * allowed_seconds;
  if (is_elsewhere && (is_circle || was_late)) end = end_at(peer, theirs);
  std::string chain;
  if (end.rank != theirs_rank) {
    chain = who + (is_elsewhere ? " has not called it: it waits in another group" : " waits");
    const int next = is_elsewhere ? end.rank : job_rank(theirs.waiting_for);
    chain += " for " + name_of(next);
    if (end.rank != next) chain += ", and in the end for " + name_of(end.rank);
    chain += "; ";
  }
  const bool is_fresh = end.age_ms + age_ms <= asking_ms;
  const bool is_known =
      is_there() || (end.state != ChainEnd::kUnknown && end.silent_ms >= 1000 * answer_grace_seconds(allowed_seconds));
  if (!is_fresh || !is_known) return {-1, false, chain + "why is not known"};
  if (end.rank == me && end.state == ChainEnd::kIsNotWaiting) {
    return {-1, true, chain + "so the ranks wait for one another in a circle"};
  }
  return judge_end(end, chain, end.rank == theirs_rank ? elsewhere_text(theirs) : "");
}

// `before` is said of the chain that leads there, and `elsewhere` is where its end waits, if that is known.
Communicator::Verdict Communicator::judge_end(const ChainEnd& end, const std::string& before,
                                              const std::string& elsewhere) const {
  const std::string who = name_of(end.rank);
  const int culprit = group_rank(end.rank);
  switch (end.state) {
    case ChainEnd::kIsNotWaiting: {
      const std::string last = end.last_finished.kind == OperationKind::kNone
                                   ? "and has finished none before"
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
      const std::string group = end.witness == job_rank(rank_)
                                    ? "the group '" + name_ + "'"
                                    : "the group in which " + name_of(end.witness) + " waits for it";
      return {culprit, true,
              before + who + (has_left ? " has destroyed " : " has not made ") + group +
                  (elsewhere.empty() ? "" : ", and is in " + elsewhere + " now") +
                  (has_left ? "; destroy a group only when all its ranks have finished with it"
                            : "; all ranks call new_group, in the same order")};
    }
    case ChainEnd::kDoesNotAnswer:
      if (end.rank == job_rank(rank_)) break;  // the witness's requests get lost on their way to this rank
      return {culprit, true, before + who + " does not answer: its process is stopped or its host is unreachable"};
    case ChainEnd::kUnreachable:
    case ChainEnd::kUnknown: break;
  }
  return {-1, true,
          before + "the connection between " + name_of(end.witness) + " and " + who +
              " is silent: nothing that is sent over it arrives (the link is cut, or a host is down)",
          end.rank == job_rank(rank_) ? -1 : culprit, end.witness};
}

// A connection is silent. If others hear from the rank at its far end, it is the connection; if nobody does, the rank;
// and if this rank hears from nobody at all, its own connection to the world. Nobody can tell where there are only two.
Communicator::Verdict Communicator::ask_others(const Verdict& verdict, double allowed_seconds) {
  const auto since = Deadline::Clock::now();
  const Deadline grace = Deadline::after(seconds(chain_grace_seconds(allowed_seconds)) + kSilence);
  auto next_request = since;
  for (;;) {
    if (Deadline::Clock::now() >= next_request) {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) request_status(peer, {.about = peer == verdict.unreachable ? -1 : verdict.unreachable});
      }
      next_request = Deadline::Clock::now() + kRequestInterval;
    }
    pause();
    const bool is_last = grace.expired();
    if (const auto better = weigh_answers(verdict, since, is_last)) return *better;
    if (is_last) return verdict;
  }
}

// The verdict when the others' answers make it certain, or are all that will come.
std::optional<Communicator::Verdict> Communicator::weigh_answers(const Verdict& verdict, TimePoint since,
                                                                 bool is_last) const {
  const auto now = Deadline::Clock::now();
  int there = 0, silent = 0, deaf = 0, undecided = 0;
  {
    std::lock_guard lock(mutex_);
    for (int peer = 0; peer < size_; ++peer) {
      const Peer& p = *peers_[static_cast<size_t>(peer)];
      if (peer == rank_ || !p.control || p.departed.load(std::memory_order_relaxed)) continue;
      const bool answers = p.answer && p.answered_at >= since;
      const bool is_silent = !answers && p.unanswered_since && now - *p.unanswered_since >= kSilence;
      if (peer == verdict.unreachable) {
        if (answers) return verdict;  // this rank hears from it
        silent += is_silent;
        deaf += is_silent && verdict.witness != job_rank(rank_);
      } else if (answers) {
        ++there;
        if (p.answer->hearing == PeerStatus::kHears) return verdict;
        deaf += p.answer->hearing == PeerStatus::kHearsNothing;
        undecided += p.answer->hearing == PeerStatus::kNotYetKnown;
      } else {
        silent += is_silent;
        undecided += !is_silent;
      }
    }
  }
  if (undecided > 0 && !is_last) return std::nullopt;
  if (there == 0 && silent > 1) {
    return Verdict{
        rank_, true,
        verdict.what + "; this rank hears from none of " + std::to_string(silent) + " others: its own host is cut off"};
  }
  if (deaf == 0 || there < silent) return verdict;
  return Verdict{verdict.unreachable, true,
                 verdict.what + "; nor does anybody else hear from rank " + std::to_string(verdict.unreachable)};
}

void Communicator::pause() {
  throw_if_poisoned();
  check_interrupt();
  const uint32_t epoch = doorbell_->prepare();
  doorbell_->sleep(epoch, milliseconds(10));
}

void Communicator::deadline_exceeded(int peer) {
  if (has_departed(peer)) throw_departed(peer);
  const double allowed = deadline_->allowed_seconds();
  bool has_control;
  {
    std::lock_guard lock(mutex_);
    has_control = peers_[static_cast<size_t>(peer)]->control != nullptr;
  }
  if (!has_control) throw_late(peer, "rank " + std::to_string(peer) + " did not do its part", allowed);
  const StatusRequest request{.hops = static_cast<uint32_t>(size_)};
  blame(peer, allowed, [&] { request_status(peer, request); });
}

void Communicator::blame(int peer, double allowed_seconds, const std::function<void()>& ask_peer) {
  const auto since = Deadline::Clock::now();
  const Deadline grace =
      Deadline::after(seconds(answer_grace_seconds(allowed_seconds) + chain_grace_seconds(allowed_seconds)));
  auto next_request = since;
  Verdict verdict;
  do {
    if (Deadline::Clock::now() >= next_request) {
      ask_peer();
      next_request = Deadline::Clock::now() + kRequestInterval;
    }
    pause();
    verdict = judge(peer, since, allowed_seconds);
  } while (!verdict.is_final && !grace.expired());
  if (verdict.unreachable >= 0) verdict = ask_others(verdict, allowed_seconds);
  throw_late(verdict.culprit, verdict.what, allowed_seconds);
}

void Communicator::throw_late(int culprit, const std::string& what, double allowed_seconds) const {
  Operation operation;
  {
    std::lock_guard lock(mutex_);
    operation = status_.operation;
  }
  throw Error(ErrorKind::kDeadlineExceeded,
              describe(operation) + " of group '" + name_ + "' did not end within " + seconds_text(allowed_seconds) +
                  ": " + what + " (a longer timeout can be given to init_process_group)",
              culprit, std::string(operation_name(operation.kind)));
}

}  // namespace bagua

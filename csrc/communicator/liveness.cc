// Links, causes, answers and verdicts; see liveness.h. Whom the answers accuse is in blame.h; here they are asked for,
// and kept. Where a connection is silent, the others are asked what they hear from its far end: by the links, for all
// groups at once (ProcessLink::inquire).
#include "csrc/communicator/liveness.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "csrc/communicator/blame.h"
#include "csrc/communicator/control_link.h"

namespace bagua {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// A rank that has not answered for so long counts as silent, and one that has answered since as there. Above what a
// host may delay an acknowledgement.
constexpr milliseconds kSilence{300};
constexpr int kMissedHeartbeats = 3;
// How often who waits asks. Who forwards requests drops some, or they would go round in circles of ranks ever faster.
constexpr milliseconds kRequestInterval{50};
constexpr milliseconds kMinRequestInterval{20};
// How long it may take until the others have told what they failed with.
constexpr milliseconds kAgreement{200};
// The time for which the others are asked about a silent peer: a rank that has no link to it finds out meanwhile.
constexpr milliseconds kMinInquiry = 2 * kSilence, kMaxInquiry{1000};
// How many of the others need a link, so that they can be asked.
constexpr int kWitnesses = 4;

nanoseconds inquiry_length(nanoseconds silence) {
  return std::clamp<nanoseconds>(silence / 5, kMinInquiry, kMaxInquiry);
}

nanoseconds seconds(double value) { return nanoseconds(static_cast<int64_t>(value * 1e9)); }

uint32_t milliseconds_in(nanoseconds time) {
  return static_cast<uint32_t>(std::clamp<int64_t>(duration_cast<milliseconds>(time).count(), 0, INT32_MAX));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

Liveness::Liveness(int rank, int size, std::string group, Doorbell& doorbell)
    : ranks_{rank, size, std::move(group), {}}, doorbell_(doorbell) {
  for (int i = 0; i < size; ++i) peers_.push_back(std::make_unique<Peer>());
}

Liveness::~Liveness() {
  leave_process();
  stop_links();
}

void Liveness::join_process(std::shared_ptr<Process> process, std::vector<int> job_ranks, std::string key) {
  ranks_.job_ranks = std::move(job_ranks);
  key_ = std::move(key);
  process_ = std::move(process);
  if (process_) process_->add(this);
}

void Liveness::leave_process() {
  if (!process_) return;
  process_->remove(this, report());
}

// ---- links

std::vector<std::shared_ptr<ControlLink>> Liveness::links() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<ControlLink>> all;
  for (const auto& peer : peers_) {
    if (peer->control) all.push_back(peer->control);
  }
  return all;
}

void Liveness::stop_links() {
  for (auto& link : links()) link->stop();
}

void Liveness::say_goodbye() {
  const auto why = failure_of_process();
  for (auto& link : links()) {
    link->send_leave(why);
    link->stop();
  }
}

void Liveness::drop_links() {
  const auto dropped = links();  // dropped without the lock: it may be the reactor's last user
  std::lock_guard lock(mutex_);
  for (auto& peer : peers_) peer->control.reset();
}

void Liveness::attach(int peer, std::shared_ptr<ControlLink> control) {
  {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(peer)]->control = control;
  }
  greet(peer, *control);
}

bool Liveness::link_made(int job_rank, const std::shared_ptr<ProcessLink>& link) {
  const int peer = ranks_.group_rank(job_rank);
  if (peer < 0 || peer == ranks_.rank) return false;
  auto control = std::make_shared<ControlLink>(link, key_, peer);
  {
    std::lock_guard lock(mutex_);
    Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.control) return false;  // its link has ended, and with it what is between the two in this group
    p.control = control;
    p.doubt.reset();  // it began without
  }
  greet(peer, *control);
  doorbell_.ring();
  return true;
}

// A peer that connects to a group that has failed is told why at once. (A poisoning that comes after this look sees the
// link.) Whether it has failed there, or the peer has left, comes as an answer.
void Liveness::greet(int peer, ControlLink& control) {
  listen(peer, control);
  if (!tell(control)) request_status(peer);
}

// Whether there was a failure to tell of.
bool Liveness::tell(ControlLink& control) const {
  std::optional<Error> cause;
  Losses losses;
  {
    std::lock_guard lock(mutex_);
    cause = cause_;
    losses = confirmed_locked();
  }
  if (cause) control.send_abort(*cause, losses);
  return cause.has_value();
}

std::optional<std::vector<uint8_t>> Liveness::report() const {
  std::lock_guard lock(mutex_);
  if (!cause_) return std::nullopt;
  return abort_bytes(*cause_, confirmed_locked());
}

std::shared_ptr<ControlLink> Liveness::control(int peer) const {
  std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)]->control;
}

void Liveness::note_unreachable(int peer, const std::string& what, bool names_peer) {
  std::lock_guard lock(mutex_);
  Peer& p = *peers_[static_cast<size_t>(peer)];
  p.unreachable = what;
  p.names_peer = names_peer;
  if (names_peer) {
    p.unreachable_since.reset();
  } else if (!p.unreachable_since) {
    p.unreachable_since = Deadline::Clock::now();
  }
}

bool Liveness::poison(const Error& cause, bool tell_peers) {
  {
    std::lock_guard lock(mutex_);
    if (cause_) return false;
    cause_ = cause;
    poisoned_at_ = Deadline::Clock::now();
    note_cause_locked();
    agree_if_due_locked();
  }
  poisoned_.store(true, std::memory_order_release);
  if (tell_peers) tell_all(cause);
  if (process_) {
    process_->note_failure(Error(cause.kind(), "in group '" + ranks_.group + "': " + cause.what(),
                                 cause.rank() >= 0 ? ranks_.job_rank(cause.rank()) : -1, cause.operation()));
  }
  doorbell_.ring();
  return true;
}

void Liveness::throw_if_poisoned() {
  if (is_poisoned()) throw agreed_cause();
}

// ---- what this rank does

void Liveness::begin(const Operation& operation) {
  throw_if_poisoned();
  if (process_) process_->forget_failure();  // a program that begins something has got over it
  std::lock_guard lock(mutex_);
  status_.operation = operation;
}

void Liveness::end(const Operation& operation) {
  std::lock_guard lock(mutex_);
  if (operation.sequence != 0) status_.last_finished = operation;
  status_.operation = Operation{};
  stop_waiting();
  // Unmaps what peers have freed while the operation ran; outside of operations on_released does it at once.
  for (auto& peer : peers_) {
    if (peer->control) peer->control->unmap_released();
  }
}

// ---- what a peer's control link tells

void Liveness::listen(int peer, ControlLink& control) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  ControlLink::Events events;
  events.on_abort = [this, peer](const Error& cause, const Losses& theirs) { take_abort(peer, cause, theirs); };
  events.on_failure = [this](const Error& cause) {
    poison(Error(cause.kind(), cause.what(), cause.rank() >= 0 ? cause.rank() : ranks_.rank));
  };
  events.on_lost = [this, peer](const std::string& how) { take_loss(peer, how); };
  events.on_leave = [this, &p](const std::optional<Error>& why) {
    {
      std::lock_guard lock(mutex_);
      p.why_left = why;
      p.departed.store(true, std::memory_order_release);
      agree_if_due_locked();
    }
    doorbell_.ring();
  };
  events.on_silence = [this, peer](const ProcessLink::Silence& silence) { doubt(peer, silence); };
  events.on_status = [this, peer](const PeerStatus& status) {
    take_answer(peer, status);
    doorbell_.ring();
  };
  events.my_status = [this, &control](const StatusRequest& request) {
    tell(control);  // the peer may not have had the group before
    return answer(request);
  };
  events.on_segment = [this] { doorbell_.ring(); };
  events.on_released = [this, &p] {
    std::lock_guard lock(mutex_);
    if (status_.operation.kind == OperationKind::kNone) p.control->unmap_released();
  };
  control.start(std::move(events));
}

void Liveness::throw_left(int peer) {
  std::optional<Error> why;
  Operation mine;
  {
    std::lock_guard lock(mutex_);
    why = peers_[static_cast<size_t>(peer)]->why_left;
    mine = status_.operation;
  }
  const std::string left = "rank " + std::to_string(peer) + " left the group '" + ranks_.group +
                           "' while this rank waits for it in " + describe(mine);
  const std::string operation(operation_name(mine.kind));
  if (why)
    throw Error(ErrorKind::kRemote, left + "; before, " + why->what(), ranks_.group_rank(why->rank()), operation);
  throw Error(ErrorKind::kTransport, left + "; it destroyed the group, ended its program or raised: see its log", peer,
              operation);
}

// ---- what the ranks that are left say
//
// Whoever has failed tells all others with what, and who is lost to whom, as far as it knows (blame.h); again when it
// knows more. When all that are not dead have told the same, they make the same of it: the first of the dead is named.
// A rank that tells something is not dead, whatever others have seen of it; nor is one that is silent, as long as
// no rank names it. What comes later changes nothing here, and is passed on.

void Liveness::take_abort(int peer, const Error& cause, const Losses& theirs) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  {
    std::lock_guard lock(mutex_);
    agree_if_due_locked();
    if (!p.told) p.told = cause;
    p.losses.add(theirs, ranks_.size);
    losses_.add(theirs, ranks_.size);
  }
  if (cause.kind() == ErrorKind::kRemote) return fail_or_tell(cause);
  const int culprit = cause.rank() < 0 && is_own_fault(cause, peer) ? peer : cause.rank();
  fail_or_tell(Error(ErrorKind::kRemote, "rank " + std::to_string(peer) + " reported: " + cause.what(), culprit,
                     cause.operation()));
}

void Liveness::take_loss(int peer, const std::string& how) {
  {
    std::lock_guard lock(mutex_);
    agree_if_due_locked();
    peers_[static_cast<size_t>(peer)]->is_lost = true;
    losses_.lost.insert(peer);
  }
  fail_or_tell(Error(ErrorKind::kTransport,
                     "rank " + std::to_string(peer) + " " + how +
                         " without leaving the group: its process died or the network between the hosts failed; see "
                         "the log of rank " +
                         std::to_string(peer),
                     peer, std::string(operation_name(status().operation.kind))));
}

// After losses_ may have grown: fails with `cause`, or, where it has failed, tells the others what is new.
void Liveness::fail_or_tell(const Error& cause) {
  if (poison(cause)) return;
  std::optional<Error> first;
  {
    std::lock_guard lock(mutex_);
    refute_locked();
    agree_if_due_locked();
    if (confirmed_locked() == told_) return;
    first = cause_;
  }
  tell_all(*first);
}

// A cause of this rank that names another one, over the connection to it, or several, which others have agreed on.
void Liveness::note_cause_locked() {
  Losses losses;
  const auto ranks = cause_->ranks();
  const bool is_loss = cause_->kind() == ErrorKind::kTransport && cause_->rank() != ranks_.rank;
  if (is_loss || ranks.size() > 1) losses.lost.insert(ranks.begin(), ranks.end());
  losses_.add(losses, ranks_.size);
  refute_locked();
}

// Among those that are lost to some rank, each that has told this rank something is there; for this rank itself, others
// say so, unless it has told them too late, as after it was stopped: whom this rank has named as dead, it does not take
// back. One that has told of its own fault is named for that.
void Liveness::refute_locked() {
  const std::vector<int> named = is_cause_agreed_ ? cause_->ranks() : std::vector<int>{};
  for (const int rank : losses_.lost) {
    if (std::find(named.begin(), named.end(), rank) != named.end()) continue;
    const auto& told = peers_[static_cast<size_t>(rank)]->told;
    if (told && !is_own_fault(*told, rank)) losses_.there.insert(rank);
  }
}

// The losses that this rank tells others: those that it has found itself, or cannot judge. As long as its own link to
// one is well, it may yet hear that it is the connection to another rank that has failed.
Losses Liveness::confirmed_locked() const {
  Losses confirmed = losses_;
  std::erase_if(confirmed.lost, [this](int rank) {
    if (rank == ranks_.rank || losses_.there.count(rank) != 0) return false;
    if (cause_ && cause_->kind() == ErrorKind::kTransport && cause_->rank() == rank) return false;
    const Peer& p = *peers_[static_cast<size_t>(rank)];
    const bool has_ended = p.told || p.is_lost || p.departed.load(std::memory_order_relaxed);
    return p.control && !has_ended && !is_silent_locked(p);
  });
  return confirmed;
}

void Liveness::tell_all(const Error& cause) {
  std::vector<std::shared_ptr<ControlLink>> links;
  Losses losses;
  {
    std::lock_guard lock(mutex_);
    losses = told_ = confirmed_locked();
    for (auto& peer : peers_) {
      if (peer->control && !peer->is_lost) links.push_back(peer->control);
    }
  }
  for (auto& link : links) link->send_abort(cause, losses);
}

// Whether others may still tell of more: those linked to this rank that have told nothing, or something else than this
// one; not from those that are named and silent. Where some rank is lost, also those that are linked only to others;
// and where it is this rank, any rank may yet say that it is there.
bool Liveness::is_cause_awaited_locked() const {
  if (losses_.lost.count(ranks_.rank) > losses_.there.count(ranks_.rank)) return true;
  std::set<int> named = losses_.lost;
  named.insert(cause_->rank());
  for (const auto& peer : peers_) {
    if (peer->told) named.insert(peer->told->rank());
  }
  for (int peer = 0; peer < ranks_.size; ++peer) {
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    if (peer == ranks_.rank || p.is_lost || p.departed.load(std::memory_order_relaxed)) continue;
    if (p.told && p.losses != losses_) return true;
    if (p.told || (named.count(peer) != 0 && is_silent_locked(p))) continue;
    if (p.control || (!losses_.lost.empty() && losses_.lost.count(peer) == 0)) return true;
  }
  return false;
}

// Once nothing more is awaited, or comes too late.
void Liveness::agree_if_due_locked() {
  if (!cause_ || is_cause_agreed_) return;
  if (Deadline::Clock::now() < poisoned_at_ + kAgreement && is_cause_awaited_locked()) return;
  is_cause_agreed_ = true;
  cause_changed_.notify_all();
  const std::vector<int> dead = losses_.dead();
  if (dead.empty()) {
    if (losses_.lost.count(cause_->rank()) == 0) return;
    cause_ = Error(cause_->kind(),
                   std::string(cause_->what()) + "; rank " + std::to_string(cause_->rank()) +
                       " is there, so the connection to it has failed",
                   -1, cause_->operation());
    return;
  }
  if (cause_->rank() != dead.front()) {
    const auto operation = cause_->operation();
    cause_ = Error(ErrorKind::kTransport, "rank " + std::to_string(dead.front()) + " is lost, too: " + cause_->what(),
                   dead.front(), operation);
  }
  cause_ = cause_->of_ranks(dead);
}

Error Liveness::agreed_cause() {
  std::unique_lock lock(mutex_);
  agree_if_due_locked();  // some rank may have fallen silent meanwhile
  cause_changed_.wait_until(lock, poisoned_at_ + kAgreement, [this] { return is_cause_agreed_; });
  agree_if_due_locked();
  return *cause_;
}

// ---- who waits for whom: what this rank knows and tells

PeerStatus Liveness::status() const {
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
  status.end.rank = status.end.witness = ranks_.job_rank(ranks_.rank);
  status.end.state = ChainEnd::kIsNotWaiting;
  status.end.operation = status.operation;
  status.end.last_finished = status.last_finished;
  return status;
}

ChainEnd Liveness::end_behind_locked(int peer) const {
  const Peer& p = *peers_[static_cast<size_t>(peer)];
  const auto now = Deadline::Clock::now();
  ChainEnd end;
  end.rank = ranks_.job_rank(peer);
  end.witness = ranks_.job_rank(ranks_.rank);
  if (p.unanswered_since && now - *p.unanswered_since >= kSilence) {
    end.state = p.control && !p.control->reaches_host() ? ChainEnd::kUnreachable : ChainEnd::kDoesNotAnswer;
    end.silent_ms = milliseconds_in(now - *p.unanswered_since);
  } else if (p.answer &&
             p.answered_at.time_since_epoch().count() >= waiting_since_ns_.load(std::memory_order_relaxed)) {
    end = p.answer->end;  // what was said before this wait does not count
    end.age_ms += milliseconds_in(now - p.answered_at);
  }
  return end;
}

std::optional<Process::Wait> Liveness::wait_of_a_thread() const {
  std::lock_guard lock(mutex_);  // an operation that is waited in does not end meanwhile
  const int peer = waits_for();
  const bool stands_still = peer >= 0 && num_waiters_ && num_waiters_->load(std::memory_order_relaxed) > 0;
  if (!stands_still) return std::nullopt;
  const TimePoint since(TimePoint::duration(waiting_since_ns_.load(std::memory_order_relaxed)));
  return Process::Wait{milliseconds_in(Deadline::Clock::now() - since), status_.operation, ranks_.group,
                       end_behind_locked(peer)};
}

void Liveness::now_awaits_message(int peer) {
  if (waits_for() != peer) now_waiting_for(peer, Deadline::Clock::now());
}

// ---- requests and answers

void Liveness::request_status(int peer, const StatusRequest& request) {
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

void Liveness::forward_request(uint32_t hops) {
  if (hops == 0) return;
  const int peer = waits_for();
  if (peer < 0) return;
  {
    std::lock_guard lock(mutex_);
    if (Deadline::Clock::now() - peers_[static_cast<size_t>(peer)]->last_request < kMinRequestInterval) return;
  }
  request_status(peer, {.hops = hops - 1});
}

PeerStatus Liveness::answer(const StatusRequest& request) {
  PeerStatus status = this->status();
  if (status.waiting_for >= 0) {
    forward_request(request.hops);
  } else if (status.elsewhere_ms > 0) {
    process_->forward_request_except(this, request.hops);
  }
  return status;
}

// Whether a peer without a link has shown no sign of its host for long.
bool Liveness::is_unreachable_locked(const Peer& p) const {
  return !p.control && p.unreachable_since && Deadline::Clock::now() - *p.unreachable_since >= kSilence;
}

// Whether a peer has not answered for long, sends not even heartbeats, or cannot be linked.
bool Liveness::is_silent_locked(const Peer& p) const {
  if (!p.control) return is_unreachable_locked(p);
  const ProcessLink& link = p.control->process_link();
  return link.silent_for() >= kMissedHeartbeats * link.pace().heartbeat || link.unanswered_for() >= kSilence;
}

bool Liveness::is_linked_well(int job_rank) const {
  const int peer = ranks_.group_rank(job_rank);
  if (peer < 0 || peer >= ranks_.size || peer == ranks_.rank || is_poisoned()) return false;
  return control(peer) != nullptr;
}

// Judges by an answer that is not old, or an inquiry that has not been answered for long. Asks, or dials, so as to know
// it next time. A group that has failed dials no rank.
std::optional<Hearing> Liveness::hearing_of(int job_rank) {
  const int peer = ranks_.group_rank(job_rank);
  if (peer < 0 || peer >= ranks_.size || peer == ranks_.rank) return std::nullopt;
  std::shared_ptr<ControlLink> control;
  bool is_silent;
  {
    std::lock_guard lock(mutex_);
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.departed.load(std::memory_order_relaxed)) return std::nullopt;
    is_silent = is_silent_locked(p);
    if (!p.control && cause_ && !is_silent) return std::nullopt;
    if (!p.control) return probe_locked(peer);
    control = p.control;
  }
  ProcessLink& link = control->process_link();
  link.inquire(-1);
  if (is_silent) return Hearing::kHearsNothing;
  return link.has_answered_since(Deadline::Clock::now() - kSilence) ? Hearing::kHears : Hearing::kNotYetKnown;
}

// Judges a peer without a link by whether its host takes a connection, for which the worker has it dialed once in a
// while.
Hearing Liveness::probe_locked(int peer) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  if (is_unreachable_locked(p)) return Hearing::kHearsNothing;
  if (!dial_) return Hearing::kCannotTell;
  const auto now = Deadline::Clock::now();
  if (!p.unreachable_since && (!p.probed_at || now - *p.probed_at > kMaxInquiry)) {
    p.probed_at = now;
    p.is_probe_due = true;
    has_probes_.store(true, std::memory_order_release);
    doorbell_.ring();
    if (wake_worker_) wake_worker_();
  }
  return is_probing_locked(p) ? Hearing::kNotYetKnown : Hearing::kCannotTell;
}

// Not any more where the host has taken a connection and the process does not answer.
bool Liveness::is_probing_locked(const Peer& p) const {
  return p.unreachable_since || (p.probed_at && !(p.names_peer && Deadline::Clock::now() - *p.probed_at > kSilence));
}

void Liveness::dial_probed() {
  if (!has_probes_.load(std::memory_order_relaxed) || !has_probes_.exchange(false, std::memory_order_acquire)) return;
  std::vector<int> probed;
  {
    std::lock_guard lock(mutex_);
    for (int peer = 0; peer < ranks_.size; ++peer) {
      if (peer == ranks_.rank) continue;
      Peer& p = *peers_[static_cast<size_t>(peer)];
      if (std::exchange(p.is_probe_due, false) && !p.control) probed.push_back(peer);
    }
  }
  for (const int peer : probed) dial_(peer);
}

void Liveness::take_answer(int peer, const PeerStatus& theirs) {
  std::lock_guard lock(mutex_);
  Peer& p = *peers_[static_cast<size_t>(peer)];
  p.answer = theirs;
  if (theirs.group != PeerStatus::kHasMade && theirs.elsewhere_ms == 0) p.answer->end = end_at(ranks_, peer, theirs);
  p.answered_at = Deadline::Clock::now();
  p.unanswered_since.reset();
  p.is_unread = true;
}

void Liveness::compare_answer(int peer) {
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

Verdict Liveness::judge(int peer, TimePoint since, double allowed_seconds) const {
  const auto now = Deadline::Clock::now();
  std::optional<PeerStatus> theirs;
  ChainEnd silent;
  uint32_t age_ms = 0;
  Operation mine;
  {
    std::lock_guard lock(mutex_);
    mine = status_.operation;
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.unanswered_since && now - *p.unanswered_since >= seconds(answer_grace_seconds(allowed_seconds))) {
      silent = end_behind_locked(peer);
    } else if (p.answer && p.answered_at >= since) {
      theirs = p.answer;
      age_ms = milliseconds_in(now - p.answered_at);
    }
  }
  if (silent.state != ChainEnd::kUnknown) return judge_end(ranks_, silent);
  if (theirs) return judge_answer(ranks_, mine, peer, *theirs, age_ms, milliseconds_in(now - since), allowed_seconds);
  return {peer, false, "rank " + std::to_string(peer) + " has not answered yet"};
}

// A connection is silent. If others hear from the rank at its far end, it is the connection; if no rank does, the rank;
// and if this rank hears from no rank at all, its own connection to the world. Where there are only two, no rank can
// tell.
Verdict Liveness::ask_others(const Verdict& verdict, double allowed_seconds, const CheckInterrupt& check_interrupt) {
  const auto now = Deadline::Clock::now();
  const auto until = now + seconds(chain_grace_seconds(allowed_seconds)) + kSilence;
  for (;;) {
    ask_about(verdict.unreachable);
    pause(check_interrupt);
    const bool is_last = Deadline::Clock::now() >= until;
    if (const auto better = weigh_answers(verdict, now, is_last)) return *better;
    if (is_last) return verdict;
  }
}

// Asks every rank what it hears from the rank at the far end, and that rank whether it is there. Dials some of the
// others where this rank has links to few.
void Liveness::ask_about(int unreachable) {
  std::vector<std::pair<int, std::shared_ptr<ControlLink>>> asked;
  {
    std::lock_guard lock(mutex_);
    int num_others = 0;
    for (const bool dials : {false, true}) {
      for (int peer = 0; peer < ranks_.size && num_others < kWitnesses; ++peer) {
        if (peer == ranks_.rank || peer == unreachable) continue;
        const bool is_linked = peers_[static_cast<size_t>(peer)]->control != nullptr;
        num_others += dials ? !is_linked && probe_locked(peer) != Hearing::kCannotTell : is_linked;
      }
    }
    for (int peer = 0; peer < ranks_.size; ++peer) {
      if (auto& control = peers_[static_cast<size_t>(peer)]->control) asked.emplace_back(peer, control);
    }
  }
  for (auto& [peer, control] : asked) {
    control->process_link().inquire(peer == unreachable ? -1 : ranks_.job_rank(unreachable));
  }
}

// To be called again and again while a peer is suspected: the verdict, once the others have answered or had `limit` to.
// `suspicion` is what this rank knows by itself.
std::optional<Verdict> Liveness::inquire(int peer, nanoseconds limit, const Verdict& suspicion) {
  const auto now = Deadline::Clock::now();
  Doubt doubt;
  {
    std::lock_guard lock(mutex_);
    auto& known = peers_[static_cast<size_t>(peer)]->doubt;
    // An older one ended when the peer was heard again.
    if (!known || now - known->until > kMaxInquiry) known = {suspicion, now, now + limit};
    doubt = *known;
  }
  if (doubt.verdict.unreachable < 0) return doubt.verdict;
  ask_about(doubt.verdict.unreachable);
  const bool is_last = now >= doubt.until;
  const auto weighed = weigh_answers(doubt.verdict, doubt.since, is_last);
  return weighed || !is_last ? weighed : doubt.verdict;
}

// On the reactor thread, at every tick while nothing arrives from a peer: whether or not anybody waits for it here, who
// is silent for so long has to do with a failure.
void Liveness::doubt(int peer, const ProcessLink::Silence& silence) {
  if (is_poisoned()) return;
  ChainEnd end;
  end.rank = ranks_.job_rank(peer);
  end.witness = ranks_.job_rank(ranks_.rank);
  end.state = silence.reaches_host ? ChainEnd::kDoesNotAnswer : ChainEnd::kUnreachable;
  const auto verdict = inquire(peer, inquiry_length(silence.lasts), judge_end(ranks_, end));
  if (!verdict || !silence.is_over) return;
  poison(Error(ErrorKind::kTransport,
               "nothing has come from rank " + std::to_string(peer) + " for " +
                   seconds_text(std::chrono::duration<double>(silence.lasts).count()) + ": " + verdict->what +
                   " (BAGUA_HEARTBEAT_TIMEOUT sets how long that may take)",
               verdict->culprit, std::string(operation_name(status().operation.kind))));
}

void Liveness::doubt_unlinked(int peer, nanoseconds silence, const std::string& what) {
  if (is_poisoned() || control(peer)) return;  // it may have come the other way meanwhile
  note_unreachable(peer, what, false);
  const Verdict suspicion{-1, true, what, peer, ranks_.job_rank(ranks_.rank)};
  const auto verdict = inquire(peer, inquiry_length(silence), suspicion);
  if (!verdict) return;
  poison(Error(ErrorKind::kTransport, verdict->what, verdict->culprit,
               std::string(operation_name(status().operation.kind))));
}

// The verdict when the others' answers make it certain, or are all that will come.
std::optional<Verdict> Liveness::weigh_answers(const Verdict& verdict, TimePoint since, bool is_last) const {
  const int about = ranks_.job_rank(verdict.unreachable);
  int there = 0, silent = 0, deaf = 0, undecided = 0;
  std::string unknowing;
  {
    std::lock_guard lock(mutex_);
    for (int peer = 0; peer < ranks_.size; ++peer) {
      const Peer& p = *peers_[static_cast<size_t>(peer)];
      if (peer == ranks_.rank || p.departed.load(std::memory_order_relaxed)) continue;
      if (!p.control && !is_unreachable_locked(p)) {
        undecided += is_probing_locked(p);
        continue;
      }
      const bool answers = p.control && p.control->process_link().has_answered_since(since);
      const bool is_silent = !answers && is_silent_locked(p);
      if (peer == verdict.unreachable) {
        if (answers) return verdict;  // this rank hears from it
        silent += is_silent;
        deaf += is_silent && verdict.witness != ranks_.job_rank(ranks_.rank);
      } else if (answers) {
        ++there;
        const auto told = p.control->process_link().testimony(about, since);
        const Hearing hearing = told.value_or(Hearing::kNotYetKnown);
        if (hearing == Hearing::kHears) return verdict;
        deaf += hearing == Hearing::kHearsNothing;
        undecided += hearing == Hearing::kNotYetKnown;
        if (hearing != Hearing::kHearsNothing) unknowing += (unknowing.empty() ? "" : ", ") + std::to_string(peer);
      } else {
        silent += is_silent;
        undecided += !is_silent;
      }
    }
  }
  if (undecided > 0 && !is_last) return std::nullopt;
  if (there == 0 && silent > 1) {
    return Verdict{
        ranks_.rank, true,
        verdict.what + "; this rank hears from none of " + std::to_string(silent) + " others: its own host is cut off"};
  }
  if (deaf == 0 || there < silent) {
    Verdict open = verdict;
    if (!unknowing.empty()) open.what += "; of the other ranks, " + unknowing + " could not tell whether it is there";
    return open;
  }
  return Verdict{verdict.unreachable, true,
                 verdict.what + "; nor does anybody else hear from rank " + std::to_string(verdict.unreachable)};
}

void Liveness::pause(const CheckInterrupt& check_interrupt) {
  throw_if_poisoned();
  if (check_interrupt) check_interrupt();
  dial_probed();
  const uint32_t epoch = doorbell_.prepare();
  doorbell_.sleep(epoch, milliseconds(10));
}

void Liveness::raise_late(int peer, double allowed, const CheckInterrupt& check_interrupt) {
  std::optional<Verdict> unlinked;
  bool is_silent = false;
  {
    std::lock_guard lock(mutex_);
    const Peer& p = *peers_[static_cast<size_t>(peer)];
    is_silent = is_unreachable_locked(p);
    if (!p.control && p.unreachable.empty()) {
      unlinked = {peer, true, "rank " + std::to_string(peer) + " did not do its part"};
    } else if (!p.control) {
      unlinked = {p.names_peer ? peer : -1, true, p.unreachable, is_silent ? peer : -1, ranks_.job_rank(ranks_.rank)};
    }
  }
  if (unlinked && is_silent) unlinked = ask_others(*unlinked, allowed, check_interrupt);
  if (unlinked) throw_late(unlinked->culprit, unlinked->what, allowed);
  const StatusRequest request{.hops = static_cast<uint32_t>(ranks_.size)};
  blame(
      peer, allowed, [&] { request_status(peer, request); }, check_interrupt);
}

void Liveness::blame(int peer, double allowed_seconds, const std::function<void()>& ask_peer,
                     const CheckInterrupt& check_interrupt) {
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
    pause(check_interrupt);
    verdict = judge(peer, since, allowed_seconds);
  } while (!verdict.is_final && !grace.expired());
  if (verdict.unreachable >= 0) verdict = ask_others(verdict, allowed_seconds, check_interrupt);
  throw_late(verdict.culprit, verdict.what, allowed_seconds);
}

void Liveness::throw_late(int culprit, const std::string& what, double allowed_seconds) const {
  Operation operation;
  {
    std::lock_guard lock(mutex_);
    operation = status_.operation;
  }
  throw Error(ErrorKind::kDeadlineExceeded,
              describe(operation) + " of group '" + ranks_.group + "' did not end within " +
                  seconds_text(allowed_seconds) + ": " + what +
                  " (a longer timeout can be given to init_process_group or new_group)",
              culprit, std::string(operation_name(operation.kind)));
}

}  // namespace bagua

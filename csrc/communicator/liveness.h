// Liveness: which ranks of a group are alive, what they do, what they have failed with, and whom to name when one is
// late. It has the control links to the peers and the first cause of a failure (poisoning).
//
// A process that dies is noticed at once: its link ends without its having left (listen). One that is stopped, or whose
// host is down, falls silent (doubt). Everything else takes a request for the peer's status, sent by a rank that has
// waited for long, and again when its deadline has passed.
//
// Threads: any, except for the methods of the worker that are marked. The mutex is taken after a Process's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/common/deadline.h"
#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/communicator/blame.h"
#include "csrc/communicator/peer_status.h"
#include "csrc/communicator/process.h"

namespace bagua {

class ControlLink;

class Liveness {
 public:
  using TimePoint = Deadline::Clock::time_point;

  // `doorbell` wakes the worker, and lives as long.
  Liveness(int rank, int size, std::string group, Doorbell& doorbell);
  ~Liveness();

  const GroupRanks& ranks() const { return ranks_; }
  // The key by which the processes know the group: no other one of theirs has it, before or after.
  const std::string& key() const { return key_; }

  // The process, which has the links, and by rank of this group the ranks of the job. Before the first link.
  void join_process(std::shared_ptr<Process> process, std::vector<int> job_ranks, std::string key);
  // Has a peer connected, by Python; called by the worker only. Before the first operation.
  void set_dial(std::function<void(int peer)> dial) { dial_ = std::move(dial); }
  // The number of threads of the program that stand still for operations of this group; kept by the engine.
  void set_num_waiters(std::shared_ptr<const std::atomic<int>> num_waiters) { num_waiters_ = std::move(num_waiters); }
  // Wakes the worker where it waits for nothing. Called on any thread, under a lock.
  void set_wake_worker(std::function<void()> wake) {
    std::lock_guard lock(mutex_);
    wake_worker_ = std::move(wake);
  }

  // ---- links

  // There is a link to the process of a rank of the job. Returns true if this group uses it.
  bool link_made(int job_rank, const std::shared_ptr<ProcessLink>& link);
  void attach(int peer, std::shared_ptr<ControlLink> control);
  std::shared_ptr<ControlLink> control(int peer) const;  // null: no link yet
  // How far the connection to a peer has come that has no link yet; `names_peer`: whether that shows whose fault it is.
  void note_unreachable(int peer, const std::string& what, bool names_peer);
  // There is no link, and no way to the peer's host for so long: asks the others, and fails once they have answered. To
  // be called again and again meanwhile.
  void doubt_unlinked(int peer, std::chrono::nanoseconds silence, const std::string& what);
  // Has peers dialed that others ask about, or that are to be asked. (The reactor's thread, which answers them, never
  // calls Python.) Called by the worker, or another thread that runs an operation.
  void dial_probed();
  bool has_left(int peer) const { return peers_[static_cast<size_t>(peer)]->departed.load(std::memory_order_acquire); }
  [[noreturn]] void throw_left(int peer);
  // Takes the group from the process; then tells the peers that this rank leaves; then drops the links.
  void leave_process();
  void stop_links();
  void say_goodbye();
  void drop_links();

  // ---- the first cause

  // The first cause wins; later ones are dropped (false). Tells the connected peers, wakes the worker.
  bool poison(const Error& cause, bool tell_peers = true);
  bool is_poisoned() const { return poisoned_.load(std::memory_order_acquire); }
  // Once the ranks that are left have told one another what they failed with, for which it may wait a moment. Not on
  // the reactor's thread.
  void throw_if_poisoned();
  std::optional<Error> failure_of_process() const { return process_ ? process_->failure() : std::nullopt; }

  // ---- what this rank does, as the worker says

  void begin(const Operation& operation);
  void end(const Operation& operation);
  void now_waiting_for(int peer, TimePoint now) {
    waiting_since_ns_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    waiting_for_.store(peer, std::memory_order_release);
  }
  void stop_waiting() { waiting_for_.store(-1, std::memory_order_relaxed); }
  // Outside of operations: the peer of the first message that is under way and has a thread waiting for it.
  void now_awaits_message(int peer);

  // ---- which rank waits for which

  PeerStatus status() const;
  // The status for a peer that asks why it is kept waiting; a rank that waits asks in turn.
  PeerStatus answer(const StatusRequest& request);
  // Whether this process hears from a rank of the job, which it finds out; nothing where this group cannot.
  std::optional<Hearing> hearing_of(int job_rank);
  // Whether it has a link to that rank, and nothing has failed.
  bool is_linked_well(int job_rank) const;
  void request_status(int peer, const StatusRequest& request = {});
  void take_answer(int peer, const PeerStatus& theirs);
  // Throws where a new answer shows that the peer is in another operation. Called by the worker.
  void compare_answer(int peer);
  // Returns the wait of the thread that stands still for this group, if there is one: since when, and where the chain
  // behind it ends.
  std::optional<Process::Wait> wait_of_a_thread() const;
  void forward_request(uint32_t hops);  // to the rank that this one waits for

  // The worker has waited for `peer` in vain: asks along the chain of those that wait, until it is known where the
  // chain ends, and raises. Whatever is named there is to blame: a rank, or a connection (then the error's rank is -1),
  // or nothing. `check_interrupt` is called meanwhile.
  using CheckInterrupt = std::function<void()>;
  [[noreturn]] void raise_late(int peer, double allowed_seconds, const CheckInterrupt& check_interrupt);
  // The same, with `ask` for the first link of the chain.
  [[noreturn]] void blame(int peer, double allowed_seconds, const std::function<void()>& ask,
                          const CheckInterrupt& check_interrupt = {});
  [[noreturn]] void throw_late(int culprit, const std::string& what, double allowed_seconds) const;

 private:
  // A connection is silent: what the others hear from the rank at its far end.
  struct Doubt {
    Verdict verdict;  // as far as this rank knows by itself
    TimePoint since, until;
  };
  struct Peer {
    std::atomic<bool> departed{false};  // set after why_left
    // Guarded by mutex_:
    std::shared_ptr<ControlLink> control;
    std::string unreachable;  // why there is none
    bool names_peer = false;
    bool is_probe_due = false;                   // the worker is to have it dialed, so as to know whether it is there
    std::optional<TimePoint> probed_at;          // when that became due, last
    std::optional<TimePoint> unreachable_since;  // without a sign of its host
    std::optional<Doubt> doubt;                  // since it is silent
    std::optional<Error> told;                   // what it has failed with, first
    Losses losses;                               // those that it has told of
    bool is_lost = false;                        // its link has ended, and it had not left
    std::optional<Error> why_left;               // what it said when it left
    std::optional<TimePoint> unanswered_since;   // the first request since it has answered
    TimePoint last_request;
    std::optional<PeerStatus> answer;
    TimePoint answered_at;
    bool is_unread = false;  // the worker has not looked at the answer
  };

  void listen(int peer, ControlLink& control);
  void greet(int peer, ControlLink& control);
  std::optional<Verdict> inquire(int peer, std::chrono::nanoseconds limit, const Verdict& suspicion);
  void doubt(int peer, const ProcessLink::Silence& silence);
  std::optional<std::vector<uint8_t>> report() const;
  bool tell(ControlLink& control) const;
  void tell_all(const Error& cause);
  void take_abort(int peer, const Error& cause, const Losses& theirs);
  void take_loss(int peer, const std::string& how);
  void fail_or_tell(const Error& cause);
  void note_cause_locked();
  void refute_locked();
  Losses confirmed_locked() const;
  Error agreed_cause();
  void agree_if_due_locked();
  bool is_cause_awaited_locked() const;
  int waits_for() const { return waiting_for_.load(std::memory_order_acquire); }
  ChainEnd end_behind_locked(int peer) const;
  bool is_silent_locked(const Peer& p) const;
  bool is_unreachable_locked(const Peer& p) const;
  Hearing probe_locked(int peer);
  bool is_probing_locked(const Peer& p) const;
  Verdict judge(int peer, TimePoint since, double allowed_seconds) const;
  Verdict ask_others(const Verdict& verdict, double allowed_seconds, const CheckInterrupt& check_interrupt);
  void ask_about(int unreachable);
  std::optional<Verdict> weigh_answers(const Verdict& verdict, TimePoint since, bool is_last) const;
  void pause(const CheckInterrupt& check_interrupt);
  std::vector<std::shared_ptr<ControlLink>> links() const;

  GroupRanks ranks_;  // made by the constructor and join_process, then read by any thread, as the next
  std::string key_;
  Doorbell& doorbell_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; the own entry stays empty
  std::function<void(int peer)> dial_;
  std::shared_ptr<Process> process_;  // null: no other groups
  std::shared_ptr<const std::atomic<int>> num_waiters_;

  std::atomic<bool> has_probes_{false};
  std::atomic<int> waiting_for_{-1};  // set by the worker, in and between operations
  std::atomic<Deadline::Clock::rep> waiting_since_ns_{0};
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;  // guards what follows, and the fields of peers_ that are not atomic
  std::function<void()> wake_worker_;
  std::optional<Error> cause_;
  Losses losses_, told_;  // as far as is known, and as it was told
  TimePoint poisoned_at_;
  bool is_cause_agreed_ = false;
  std::condition_variable cause_changed_;
  PeerStatus status_;  // operation and last_finished
};

}  // namespace bagua

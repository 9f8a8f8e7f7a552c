// How the worker waits: spins, sleeps on the doorbell, asks now and then; see mesh.h. When the deadline has passed,
// mesh_blame.cc finds out whom to name.
#include <algorithm>

#include "csrc/transport/control_link.h"
#include "csrc/transport/mesh.h"
#include "csrc/transport/mesh_peer.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// Nobody sleeps longer than this without looking at the deadline and at the poison.
constexpr nanoseconds kMaxSleep = milliseconds(100);
// After a peer's goodbye, how long what it sent before may take to arrive.
constexpr nanoseconds kDepartureGrace = milliseconds(300);
// When a connection breaks, how long the reason may take to arrive on the control link.
constexpr nanoseconds kCauseGrace = milliseconds(300);
// Ranks that call different things may all wait for one another, and no message ever shows it. So who has waited for
// this long asks the peer what it is doing; later questions come at doubling intervals.
constexpr nanoseconds kFirstQuestion = milliseconds(500);
constexpr nanoseconds kLongestQuestionInterval = milliseconds(8000);
// Looking for a signal takes Python's lock, so it is not done at every wake-up.
constexpr nanoseconds kInterruptInterval = milliseconds(50);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Spins, then sleeps on the doorbell, until ready() or an error. `peer` is whom to blame.
template <typename Ready>
void Mesh::wait_until(int peer, Ready ready) {
  const auto begin = Deadline::Clock::now();
  now_waiting_for(peer, begin);
  auto spin_until = begin + spin_;
  Deadline::Clock::time_point quiet_since{};  // since a departed peer's bytes have stopped to come; 0: not departed
  nanoseconds question_interval = kFirstQuestion;
  auto next_question = begin + question_interval;
  for (;;) {
    const bool moved = progress();
    if (ready()) {
      waiting_for_.store(-1, std::memory_order_relaxed);
      return;
    }
    if (moved) {
      if (deadline_->expired()) deadline_exceeded(peer);
      spin_until = Deadline::Clock::now() + spin_;
      quiet_since = {};
      next_question = Deadline::Clock::now() + question_interval;
      continue;
    }
    if (Deadline::Clock::now() < spin_until) {
      for (int i = 0; i < 32; ++i) pause_cpu();
      continue;
    }
    const uint32_t epoch = doorbell_->prepare();
    bool again = true;
    try {
      again = progress() || ready();
    } catch (...) {
      doorbell_->cancel();
      throw;
    }
    if (again) {
      doorbell_->cancel();
      continue;
    }
    doorbell_->sleep(epoch, std::min(kMaxSleep, deadline_->remaining() + nanoseconds(1)));
    check_interrupt();
    if (deadline_->expired()) deadline_exceeded(peer);
    compare_answer(peer);
    if (Deadline::Clock::now() > next_question) {
      ask(peer);
      question_interval = std::min(2 * question_interval, kLongestQuestionInterval);
      next_question = Deadline::Clock::now() + question_interval;
    }
    if (has_departed(peer)) {
      const auto now = Deadline::Clock::now();
      if (quiet_since == Deadline::Clock::time_point{}) quiet_since = now;
      if (now - quiet_since > kDepartureGrace) departed(peer);
    }
  }
}

void Mesh::wait(Request& request) {
  if (request.done.load(std::memory_order_acquire)) return;
  wait_until(request.peer, [&] { return request.done.load(std::memory_order_acquire); });
}

void* Mesh::resolve(int peer, const Address& address, size_t bytes) {
  Channel& c = channel(peer);
  void* data = c.resolve(address, bytes);
  if (data != nullptr) return data;
  wait_until(peer, [&] {
    data = c.resolve(address, bytes);
    return data != nullptr;
  });
  return data;
}

// The poison counts once nothing moves any more: what peers sent before one of them failed (or told of a failure) is
// taken, so an operation in which all have done their part ends well, whatever its peers do next.
bool Mesh::progress() {
  const bool poisoned = is_poisoned();  // before the look at the channels, which then hold all that came before it
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    Channel* c = peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire);
    if (c != nullptr) advance(peer, *c, moved);
  }
  if (poisoned && !moved) throw_if_poisoned();
  return moved;
}

// A broken connection is often only the consequence of something that its peer has told, or is about to tell, on the
// control link (it failed for another reason, or left): then that is the cause.
void Mesh::advance(int peer, Channel& channel, bool& moved) {
  try {
    if (channel.progress()) moved = true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTransport) throw;
    const Deadline grace = Deadline::after(kCauseGrace);
    while (!grace.expired() && !is_poisoned()) {
      if (peers_[static_cast<size_t>(peer)]->departed.load(std::memory_order_acquire)) departed(peer);
      const uint32_t epoch = doorbell_->prepare();
      doorbell_->sleep(epoch, milliseconds(5));
    }
    throw_if_poisoned();
    throw;
  }
}

void Mesh::check_interrupt() {
  if (!interrupt_) return;
  const auto now = Deadline::Clock::now();
  if (now - last_interrupt_check_ < kInterruptInterval) return;
  last_interrupt_check_ = now;
  interrupt_();
}

void Mesh::departed(int peer) {
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

void Mesh::compare_answer(int peer) {
  std::optional<PeerStatus> answer;
  {
    std::lock_guard lock(mutex_);
    Peer& p = *peers_[static_cast<size_t>(peer)];
    if (p.is_news) answer = p.answer;
    p.is_news = false;
  }
  if (answer) check_status(*answer, status(), peer);
}

void Mesh::deadline_exceeded(int peer) {
  if (has_departed(peer)) departed(peer);
  const double allowed = deadline_->allowed_seconds();
  bool can_ask;
  {
    std::lock_guard lock(mutex_);
    can_ask = peers_[static_cast<size_t>(peer)]->control != nullptr;
  }
  if (!can_ask) throw_late(peer, "rank " + std::to_string(peer) + " did not do its part", allowed);
  const ControlLink::Question question{.hops = static_cast<uint32_t>(size_)};
  blame(peer, allowed, [&] { ask(peer, question); });
}

}  // namespace bagua

// The links and the groups of one process; see process.h.
#include "csrc/communicator/process.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/communicator/control_link.h"
#include "csrc/communicator/liveness.h"

namespace bagua {
namespace {

// Along chains of more ranks no rank asks for a rank that has no group to say how long they can be.
constexpr uint32_t kMaxHops = 64;

}  // namespace

void Process::Wait::write_to(PeerStatus& status) const {
  status.elsewhere_ms = std::max(waited_ms, 1u);
  status.elsewhere = operation;
  status.elsewhere_group = {};
  std::memcpy(status.elsewhere_group.data(), group.data(), std::min(group.size(), status.elsewhere_group.size() - 1));
  status.end = end;
}

// ---- links

Process::Process(std::chrono::milliseconds heartbeat_timeout)
    : pace_(heartbeat_timeout), reactor_(Reactor::instance()) {}

Process::~Process() {
  if (generation_ != process_generation()) {  // a forked child leaves its parent's threads and locks alone
    (void)new auto(std::move(links_));
    (void)new auto(std::move(reactor_));
    return;
  }
  close();
}

void Process::attach(int job_rank, int fd) {
  Descriptor owned(fd);
  std::lock_guard registry(registry_mutex_);
  if (is_linked_locked(job_rank)) {
    throw Error(ErrorKind::kTransport, "rank " + std::to_string(job_rank) + " of the job is linked already", job_rank);
  }
  const auto link = std::make_shared<ProcessLink>(
      std::move(owned), pace_,
      [this](ProcessLink& from, FrameType type, const std::string& key, const uint8_t*, size_t bytes) {
        answer_unrouted(from, type, key, bytes);
      },
      [this](int asked_about) { return hearing_of(asked_about); });
  std::vector<Liveness*> groups;
  {
    std::lock_guard lock(mutex_);
    groups = groups_;
  }
  std::erase_if(groups, [&](Liveness* group) { return !group->link_made(job_rank, link); });
  try {
    link->start();
  } catch (const Error& cause) {
    link->stop();
    for (Liveness* group : groups) {  // they take no other link
      group->poison(of_rank(cause, group->ranks().rank));
    }
    throw;
  }
  links_[job_rank] = link;
}

bool Process::is_linked_locked(int job_rank) const {
  const auto found = links_.find(job_rank);
  return found != links_.end() && !found->second->has_ended();
}

bool Process::is_linked(int job_rank) {
  std::lock_guard registry(registry_mutex_);
  return is_linked_locked(job_rank);
}

bool Process::had_link(int job_rank) {
  std::lock_guard registry(registry_mutex_);
  return links_.count(job_rank) != 0;
}

void Process::close() {
  std::lock_guard registry(registry_mutex_);
  for (auto& [rank, link] : links_) {
    link->say_goodbye();
    link->stop();
  }
  links_.clear();
  reactor_.reset();
}

// ---- groups

void Process::add(Liveness* group) {
  std::lock_guard registry(registry_mutex_);
  {
    std::lock_guard lock(mutex_);
    groups_.push_back(group);
    closed_.erase(group->key());
  }
  for (const auto& [rank, link] : links_) {
    if (!link->has_ended()) group->link_made(rank, link);
  }
}

void Process::remove(Liveness* group, std::optional<std::vector<uint8_t>> abort) {
  std::lock_guard registry(registry_mutex_);
  std::lock_guard lock(mutex_);
  if (std::erase(groups_, group) == 0) return;
  closed_.add(group->key(), std::move(abort));
}

void Process::refuse(const std::string& key, const std::vector<uint8_t>& abort) {
  std::lock_guard registry(registry_mutex_);
  {
    std::lock_guard lock(mutex_);
    closed_.add(key, abort);
  }
  for (const auto& [rank, link] : links_) {  // a peer without the group drops it
    if (!link->has_ended()) link->send(FrameType::kAbort, key, abort.data(), abort.size());
  }
}

bool Process::has_failed(const std::string& key) {
  std::lock_guard lock(mutex_);
  return closed_.abort_of(key).has_value();
}

// A peer that waits hears why there is no group, or what this process does instead. Whatever else it says of a group
// that is not here it will say again, or it has left by then.
void Process::answer_unrouted(ProcessLink& link, FrameType type, const std::string& key, size_t bytes) {
  if (type != FrameType::kStatusRequest || bytes != sizeof(StatusRequest)) return;
  bool has_left;
  std::optional<std::vector<uint8_t>> abort;
  {
    std::lock_guard lock(mutex_);
    has_left = closed_.contains(key);
    abort = closed_.abort_of(key);
  }
  if (abort) {
    link.send(FrameType::kAbort, key, abort->data(), abort->size());
    return;
  }
  const PeerStatus answer = status(has_left ? PeerStatus::kHasLeft : PeerStatus::kHasNotMade);
  link.send(FrameType::kStatus, key, &answer, sizeof answer);
}

// ---- what they wait for

std::optional<Process::Wait> Process::longest_except(const Liveness* asked) {
  std::lock_guard lock(mutex_);
  std::optional<Wait> longest;
  for (const Liveness* group : groups_) {
    if (group == asked) continue;
    const auto wait = group->wait_of_a_thread();
    if (wait && (!longest || wait->waited_ms > longest->waited_ms)) longest = wait;
  }
  return longest;
}

PeerStatus Process::status(PeerStatus::Group group) {
  PeerStatus status;
  status.group = group;
  if (const auto wait = longest_except(nullptr)) {
    wait->write_to(status);
    forward_request_except(nullptr, kMaxHops);
  }
  return status;
}

// One of the groups is enough: all of them have the same link to that rank, and would dial it in the same way. But one
// that has failed may have an older link, or none.
Hearing Process::hearing_of(int job_rank) {
  std::lock_guard lock(mutex_);
  for (const bool any : {false, true}) {
    for (Liveness* group : groups_) {
      if (!any && !group->is_linked_well(job_rank)) continue;
      if (const auto hearing = group->hearing_of(job_rank)) return *hearing;
    }
  }
  return Hearing::kCannotTell;
}

void Process::forward_request_except(const Liveness* asked, uint32_t hops) {
  std::lock_guard lock(mutex_);
  for (Liveness* group : groups_) {
    if (group != asked && group->wait_of_a_thread()) group->forward_request(hops);
  }
}

void Process::note_failure(const Error& cause) {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = cause;
  has_failed_.store(true, std::memory_order_relaxed);
}

std::optional<Error> Process::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Process::forget() {
  std::lock_guard lock(mutex_);
  failure_.reset();
  has_failed_.store(false, std::memory_order_relaxed);
}

}  // namespace bagua

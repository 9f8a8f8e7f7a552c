// The groups of one process; see process_waits.h.
#include "csrc/communicator/process_waits.h"

#include <algorithm>
#include <cstring>

#include "csrc/communicator/communicator.h"

namespace bagua {
namespace {

// Along chains of more ranks nobody asks for a rank that has no group to say how long they can be.
constexpr uint32_t kMaxHops = 64;

}  // namespace

void ProcessWaits::Wait::write_to(PeerStatus& status) const {
  status.elsewhere_ms = std::max(waited_ms, 1u);
  status.elsewhere = operation;
  status.elsewhere_group = {};
  std::memcpy(status.elsewhere_group.data(), group.data(), std::min(group.size(), status.elsewhere_group.size() - 1));
  status.end = end;
}

void ProcessWaits::add(Communicator* communicator) {
  std::lock_guard lock(mutex_);
  communicators_.push_back(communicator);
}

void ProcessWaits::remove(Communicator* communicator) {
  std::lock_guard lock(mutex_);
  std::erase(communicators_, communicator);
}

std::optional<ProcessWaits::Wait> ProcessWaits::longest_except(const Communicator* asked) {
  std::lock_guard lock(mutex_);
  std::optional<Wait> longest;
  for (const Communicator* communicator : communicators_) {
    if (communicator == asked) continue;
    const auto wait = communicator->wait_of_a_thread();
    if (wait && (!longest || wait->waited_ms > longest->waited_ms)) longest = wait;
  }
  return longest;
}

PeerStatus ProcessWaits::status(PeerStatus::Group group) {
  PeerStatus status;
  status.group = group;
  if (const auto wait = longest_except(nullptr)) {
    wait->write_to(status);
    forward_request_except(nullptr, kMaxHops);
  }
  return status;
}

void ProcessWaits::forward_request_except(const Communicator* asked, uint32_t hops) {
  std::lock_guard lock(mutex_);
  for (Communicator* communicator : communicators_) {
    if (communicator != asked && communicator->wait_of_a_thread()) communicator->forward_request(hops);
  }
}

void ProcessWaits::note_failure(const Error& cause) {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = cause;
  has_failed_.store(true, std::memory_order_relaxed);
}

std::optional<Error> ProcessWaits::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void ProcessWaits::forget() {
  std::lock_guard lock(mutex_);
  failure_.reset();
  has_failed_.store(false, std::memory_order_relaxed);
}

}  // namespace bagua

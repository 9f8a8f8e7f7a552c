// The operations that the engine has enqueued on devices, from there to their end; see engine.h. Used by the worker
// thread.
#include <algorithm>
#include <utility>

#include "csrc/engine/engine.h"

namespace bagua {
namespace {

// After the group has failed, how long what all of its ranks had enqueued before may take on the device.
constexpr std::chrono::milliseconds kFailureGrace{300};

}  // namespace

DeviceSide& Engine::side_of(Device device) {
  for (auto& side : device_sides_) {
    if (side->stream().device == device) return *side;
  }
  device_sides_.push_back(std::make_unique<DeviceSide>(device));
  communicator_->set_while_waiting([this] {
    if (std::this_thread::get_id() == worker_.get_id()) complete_enqueued();
  });
  return *device_sides_.back();
}

// The group's own stream on a device, with what follows behind the place's ready event.
Stream Engine::stream_behind(const Place& place) {
  if (place.device.is_cpu()) return {};
  const Stream stream = side_of(place.device).stream();
  if (place.ready) place.ready->let_wait(stream);
  return stream;
}

// Work that a failed operation has enqueued still uses its tensors, which are the program's again once it has failed.
// Returns the end of it; null: nothing was.
device::SharedEvent Engine::wait_for_leftovers(Device device) {
  if (device.is_cpu()) return nullptr;
  try {
    auto end = device::recorded_event(side_of(device).stream());
    device::is_done_by(Deadline::after(device::kLongestWork), *end, [this] {
      complete_enqueued();
      if (enqueued_.empty()) communicator_->abort_device_transport();
    });
    return end;
  } catch (const Error&) {  // a device that is lost, or was never there
    return nullptr;
  }
}

uint64_t Engine::device_workspace_bytes() const {
  uint64_t bytes = 0;
  for (const auto& side : device_sides_) bytes += side->workspace().total_bytes();
  return bytes;
}

void Engine::note_enqueued(Enqueued&& operation) {
  operation.task.work->set_enqueued(operation.done);
  enqueued_.push_back(std::move(operation));
}

// Ends the operations to whose end the device has come, and those that it has not come to in time; true if there was
// one. Staged, what was enqueued ends well even if the group fails meanwhile: its peers have done their part. Over a
// device transport it may wait for them still.
bool Engine::complete_enqueued() {
  release_late();
  if (enqueued_.empty()) return false;
  const bool ended = complete_done();
  const auto cause = cause_to_give_up();
  if (!cause) return ended;
  // All of it: what an abort ends looks done from here on. It ends soon, not at once; or never, behind what another
  // group has enqueued.
  const Deadline limit = Deadline::after(kFailureGrace);
  while (!enqueued_.empty()) {
    Enqueued& operation = enqueued_.front();
    device::is_done_by(limit, *operation.done);
    fail(operation.task, *cause, operation.done);
    enqueued_.pop_front();
  }
  return true;
}

// On the device. Messages of two ranks are staged in any case.
bool Engine::waits_for_peers(const Enqueued& operation) const {
  return communicator_->has_device_transport() && operation.task.operation.kind != OperationKind::kPointToPoint;
}

bool Engine::complete_done() {
  bool ended = false;
  for (auto it = enqueued_.begin(); it != enqueued_.end();) {
    Enqueued& operation = *it;
    Task& task = operation.task;
    std::optional<Error> failure;
    try {
      // Those that are left before it are not done. Of one device they are in one stream.
      const bool is_behind = std::any_of(enqueued_.begin(), it, [&](const Enqueued& earlier) {
        return earlier.task.place.device == task.place.device;
      });
      if (is_behind || !operation.done->is_done()) {
        if (!operation.deadline.expired() || waits_for_peers(operation)) {
          ++it;
          continue;
        }
        throw Error(ErrorKind::kDeadlineExceeded,
                    "the peers have done their part of " + describe(task.operation) + ", but " +
                        device_name(task.place.device) + " of this rank has not finished it in time",
                    communicator_->rank(), std::string(operation_name(task.operation.kind)));
      }
      if (operation.interval) log_device_operation(operation);
    } catch (const Error& error) {
      communicator_->liveness().poison(error);
      failure = error;
    }
    if (failure) {
      fail(task, *failure, operation.done);
    } else {
      complete(task, 0, operation.bytes_sent, operation.network_bytes_sent);
    }
    it = enqueued_.erase(it);
    ended = true;
  }
  return ended;
}

// Logs it as its device has seen it. Where the device's clock is not known yet: from its enqueuing until now.
void Engine::log_device_operation(const Enqueued& operation) {
  const int64_t now_ns = EventLog::now_ns();
  DeviceSide& side = side_of(operation.task.place.device);
  const auto begin = side.clock().host_ns(operation.interval->begin);
  const auto end = side.clock().host_ns(operation.interval->end);
  // The host's knowledge holds however well the two clocks are compared: the device began after the enqueuing began,
  // and after the operation before, and it has ended.
  const int64_t earliest_ns = std::min(std::max(operation.begin_ns, side.logged_until_ns), now_ns);
  const int64_t begin_ns = std::clamp(begin.value_or(earliest_ns), earliest_ns, now_ns);
  const int64_t end_ns = std::clamp(end.value_or(now_ns), begin_ns, now_ns);
  side.logged_until_ns = end_ns;
  events_.add_operation(operation.task.work->ticket(), operation.waits_for_some, begin_ns, end_ns, operation.task.bytes,
                        operation.bytes_sent);
}

// Why what is enqueued on a device transport will not end, which is aborted then: it reports a failure, a deadline has
// passed, or the group has failed and what its ranks had all enqueued before has had its time.
std::optional<Error> Engine::cause_to_give_up() {
  if (enqueued_.empty() || !communicator_->has_device_transport()) return std::nullopt;
  bool is_lost = false;
  try {
    communicator_->check_device_transport();
    for (const Enqueued& operation : enqueued_) expect_in_time(operation);
  } catch (const Error& error) {
    // A broken connection is often the consequence of something that its peer is about to tell.
    if (error.kind() == ErrorKind::kTransport && !communicator_->liveness().is_poisoned()) {
      if (!cause_is_told_at_) cause_is_told_at_ = Deadline::after(kFailureGrace);
      if (!cause_is_told_at_->expired()) return std::nullopt;
    }
    communicator_->liveness().poison(error);
    is_lost = true;
  }
  if (!communicator_->liveness().is_poisoned()) return std::nullopt;
  if (!give_up_at_) give_up_at_ = Deadline::after(kFailureGrace);
  if (!is_lost && !give_up_at_->expired()) return std::nullopt;
  communicator_->abort_device_transport();
  return first_cause();
}

// Names no rank: the device does not tell which one keeps it waiting.
void Engine::expect_in_time(const Enqueued& operation) {
  if (!operation.deadline.expired() || !waits_for_peers(operation)) return;
  const Task& task = operation.task;
  const DeviceTurns::Enqueued& before = operation.before;
  const bool has_begun = before.end == nullptr || before.end->is_done();
  throw Error(
      ErrorKind::kDeadlineExceeded,
      device_name(task.place.device) + " of rank " + std::to_string(communicator_->rank()) + " has not " +
          (has_begun ? "finished " : "begun ") + describe(task.operation) + " over " + communicator_->device_path() +
          " in time, " +
          (has_begun ? "though all ranks have begun it: its part or a peer's hangs on the device; it was aborted"
                     : "for it stands behind an operation of the group '" + before.group +
                           "' on that device, which has not ended; it was aborted"),
      -1, std::string(operation_name(task.operation.kind)));
}

void Engine::release_late() {
  std::erase_if(late_, [](const Late& late) {
    if (!device::is_done_by(Deadline::after({}), *late.done)) return false;
    late.work->release();
    return true;
  });
}

}  // namespace bagua

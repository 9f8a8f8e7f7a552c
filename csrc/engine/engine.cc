// Tasks of the host: the queue, the worker's loop, and messages that are under way; see engine.h. What is enqueued on
// devices is in device_queue.cc.
#include "csrc/engine/engine.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "csrc/common/thread.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// An idle worker looks around this often even if nothing rings; it costs nothing measurable.
constexpr nanoseconds kIdleSleep = milliseconds(500);
// With operations in flight their deadlines have to be looked at.
constexpr nanoseconds kInFlightSleep = milliseconds(20);
// A device rings no bell, so it is looked at; the longer it takes, the less often.
constexpr nanoseconds kPollInterval = std::chrono::microseconds(50), kLongestPollInterval = milliseconds(1);
constexpr int kLooksPerDuration = 16;

}  // namespace

Engine::Engine(std::unique_ptr<Communicator> communicator, const collectives::Thresholds& thresholds)
    : communicator_(std::move(communicator)), thresholds_(thresholds) {
  communicator_->liveness().set_num_waiters({counts_, &counts_->waiters});
  communicator_->liveness().set_wake_worker([this] { wake_worker(); });
  try {
    worker_ = start_thread("bagua-" + communicator_->name(), [this] { loop(); });
  } catch (const Error& error) {  // the peers may be there already
    const Error cause = of_rank(error, communicator_->rank());
    communicator_->liveness().poison(cause);
    throw cause;
  }
}

Engine::~Engine() {
  close();
  device_sides_.clear();  // which give the devices time to come to an end
  release_late();
  // A device that hangs or has failed may still write there, so it keeps it.
  if (!late_.empty()) new std::vector<Late>(std::move(late_));
}

Engine::Task Engine::make_task_locked(Operation operation, uint64_t bytes, Timeout timeout, Place place) {
  Task task;
  operation.device = place.device.kind;
  task.place = std::move(place);
  if (operation.kind != OperationKind::kPointToPoint) operation.sequence = next_sequence_++;
  task.work = std::make_shared<Work>(next_ticket_++, counts_);
  task.operation = operation;
  task.bytes = bytes;
  task.timeout = timeout;
  task.submitted_ns = EventLog::now_ns();
  num_unended_.fetch_add(1, std::memory_order_relaxed);
  return task;
}

// The worker may have ended already: nothing would complete it.
std::shared_ptr<Work> Engine::refuse_locked() {
  auto work = std::make_shared<Work>(next_ticket_++);
  work->fail(Error(ErrorKind::kAborted, "the group '" + communicator_->name() + "' is being destroyed",
                   communicator_->rank()));
  return work;
}

std::shared_ptr<Work> Engine::submit(Operation operation, uint64_t bytes, Timeout timeout, Run run, Place place) {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return refuse_locked();
    Task task = make_task_locked(operation, bytes, timeout, std::move(place));
    task.run = std::move(run);
    work = task.work;
    queue_.push_back(std::move(task));
  }
  wake_worker();
  return work;
}

std::shared_ptr<Work> Engine::run_inline(Operation operation, uint64_t bytes, Timeout timeout, Run run,
                                         Communicator::Interrupt interrupt) {
  Task task;
  {
    std::unique_lock lock(mutex_);
    if (running_ || stopping_ || !queue_.empty()) {
      lock.unlock();
      return submit(operation, bytes, timeout, std::move(run));
    }
    task = make_task_locked(operation, bytes, timeout);
    task.run = std::move(run);
    task.interrupt = std::move(interrupt);
    running_ = true;
  }
  {
    const Work::Waiter waiter(*task.work);
    execute(task);
  }
  bool more;
  {
    std::lock_guard lock(mutex_);
    running_ = false;
    more = !queue_.empty() || stopping_;
  }
  if (more) wake_worker();
  return task.work;
}

std::shared_ptr<Work> Engine::submit_point_to_point(bool is_send, int peer, void* data, uint64_t bytes,
                                                    Operation operation, Timeout timeout, Place place) {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return refuse_locked();
    Task task = make_task_locked(operation, bytes, timeout, std::move(place));
    task.peer = peer;
    task.is_send = is_send;
    task.data = data;
    work = task.work;
    queue_.push_back(std::move(task));
  }
  wake_worker();
  return work;
}

std::shared_ptr<Work> Engine::submit_send(int peer, const void* data, uint64_t bytes, Operation operation,
                                          Timeout timeout, Place place) {
  // const_cast: a send only reads through the pointer.
  return submit_point_to_point(true, peer, const_cast<void*>(data), bytes, operation, timeout, std::move(place));
}

std::shared_ptr<Work> Engine::submit_recv(int peer, void* data, uint64_t bytes, Operation operation, Timeout timeout,
                                          Place place) {
  return submit_point_to_point(false, peer, data, bytes, operation, timeout, std::move(place));
}

void Engine::wake_worker() {
  idle_bell_.ring();
  communicator_->doorbell().ring();
}

// Takes the next task together with the token; false when there is none, or another thread holds the token.
bool Engine::take(Task& task) {
  std::lock_guard lock(mutex_);
  const bool holds_token = !in_flight_.empty();
  if (queue_.empty() || (running_ && !holds_token)) return false;
  task = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  return true;
}

// With nothing in flight the token goes back; otherwise the worker keeps it, since only it may make progress.
void Engine::release_token() {
  std::lock_guard lock(mutex_);
  running_ = !in_flight_.empty();
}

void Engine::loop() {
  while (advance()) {
  }
}

// One round of the worker; false once it is to end.
bool Engine::advance() {
  const auto advanced = [this] {
    const bool ended = complete_enqueued();
    if (in_flight_.empty() || !complete_in_flight()) return ended;
    release_token();
    return true;
  };
  dial_probed();
  Task task;
  if (take(task)) {
    if (task.run) {
      execute(task);
    } else {
      const Deadline deadline = Deadline::after(task.timeout);
      in_flight_.emplace_back(std::move(task), deadline);
      ++num_unposted_;
      complete_in_flight();
    }
    release_token();
    return true;
  }
  if (advanced()) return true;
  if (!in_flight_.empty()) tell_awaited_message();
  // With nothing under way it leaves the communicator's doorbell to whom peers have something for: every ring would
  // wake it, in vain.
  Doorbell& bell = in_flight_.empty() && enqueued_.empty() ? idle_bell_ : communicator_->doorbell();
  const uint32_t epoch = bell.prepare();
  bool finished, has_task;
  {
    std::lock_guard lock(mutex_);
    finished = stopping_ && queue_.empty() && !running_ && enqueued_.empty();
    has_task = !queue_.empty() && (!running_ || !in_flight_.empty());
  }
  if (finished || has_task || advanced()) {
    bell.cancel();
    return !finished;
  }
  bell.sleep(epoch, idle_sleep());
  return true;
}

// A peer that cannot be dialed is not known to be there; that fails nothing.
void Engine::dial_probed() {
  try {
    communicator_->liveness().dial_probed();
  } catch (const Error&) {
  }
}

std::chrono::nanoseconds Engine::idle_sleep() const {
  if (!in_flight_.empty() && communicator_->is_polled()) return kPollInterval;
  if (enqueued_.empty()) return in_flight_.empty() && late_.empty() ? kIdleSleep : kInFlightSleep;
  if (counts_->waiters.load(std::memory_order_relaxed) > 0) return kPollInterval;
  const nanoseconds age(EventLog::now_ns() - enqueued_.front().begin_ns);
  return std::clamp(age / kLooksPerDuration, kPollInterval, kLongestPollInterval);
}

void Engine::execute(Task& task) {
  const int64_t begin_ns = EventLog::now_ns();
  const uint64_t sent_before = communicator_->bytes_sent(), network_sent_before = communicator_->network_bytes_sent();
  events_.set_ticket(task.work->ticket(), !task.place.device.is_cpu());
  events_.add(EventKind::kQueued, task.submitted_ns, begin_ns, task.bytes);
  try {
    const auto rng_key = derive_key(task.operation.sequence, static_cast<uint64_t>(communicator_->rank()));
    const Deadline deadline = Deadline::after(task.timeout);
    DeviceSide* const side = task.place.device.is_cpu() ? nullptr : &side_of(task.place.device);
    if (side != nullptr && enqueued_.empty() && in_flight_.empty()) side->clock().renew_if_old();
    const Stream stream = stream_behind(task.place);
    DeviceSide::Interval interval = side != nullptr ? side->take_interval() : DeviceSide::Interval{};
    if (side != nullptr) side->record(interval->begin);
    Workspace& workspace = side != nullptr ? side->workspace() : workspace_;
    Context context{GroupView(*communicator_), workspace, workspace_, events_, stream, thresholds_, rng_key};
    if (side != nullptr) context.pinned = [side](size_t bytes) { return side->pinned(bytes); };
    communicator_->begin(task.operation, deadline, task.interrupt, stream);
    DeviceTurns::Enqueued before = communicator_->before_on_device();
    const uint64_t nonfinite_blocks = task.run(context);
    communicator_->end();
    workspace_bytes_.store(workspace_.total_bytes() + device_workspace_bytes(), std::memory_order_relaxed);
    const uint64_t sent = communicator_->bytes_sent() - sent_before;
    const uint64_t network_sent = communicator_->network_bytes_sent() - network_sent_before;
    if (side != nullptr) {
      side->record(interval->end);  // may throw, as the next
      auto done = device::recorded_event(stream);
      note_enqueued({std::move(task), deadline, std::move(done), std::move(interval), events_.waits_for_some(),
                     begin_ns, sent, network_sent, std::move(before)});
      return;
    }
    if (context.is_result_finite) task.work->set_result_finite(*context.is_result_finite);
    events_.add(EventKind::kOperation, begin_ns, EventLog::now_ns(), task.bytes, sent);
    complete(task, nonfinite_blocks, sent, network_sent);
  } catch (...) {
    const Error cause = poison_with_current_exception();
    fail_in_flight(cause);
    fail(task, cause, wait_for_leftovers(task.place.device));
  }
}

void Engine::complete(Task& task, uint64_t nonfinite_blocks, uint64_t bytes_sent, uint64_t network_bytes_sent) {
  num_unended_.fetch_sub(1, std::memory_order_relaxed);
  task.work->complete(nonfinite_blocks, bytes_sent, network_bytes_sent);
}

// `done`: the end of what it has enqueued on a device, to which that may be late.
void Engine::fail(Task& task, const Error& cause, device::SharedEvent done) {
  const bool is_late = done != nullptr && !device::is_done_by(Deadline::after({}), *done);
  if (is_late) late_.push_back({task.work, std::move(done)});
  num_unended_.fetch_sub(1, std::memory_order_relaxed);
  task.work->fail(cause, is_late);
}

// Poisons the communicator, makes sure that no posted buffer is touched any more, and returns the first cause.
Error Engine::poison_with_current_exception() {
  Liveness& liveness = communicator_->liveness();
  try {
    throw;
  } catch (const Error& error) {
    liveness.poison(error);
  } catch (const std::bad_alloc&) {  // of a size that the program has chosen
    liveness.poison(Error(ErrorKind::kTransport,
                          "this rank has no memory left for an operation; raise its memory limit (the container's, or "
                          "`ulimit -v`), or use less: smaller tensors and buckets, fewer groups",
                          communicator_->rank()));
  } catch (const std::exception& error) {
    liveness.poison(Error(ErrorKind::kInternal, std::string("unexpected failure in the core: ") + error.what()));
  }
  communicator_->cancel();
  communicator_->end_and_isolate();
  // Work that this operation has enqueued may wait for peers that will not come. Others that are enqueued have their
  // time.
  if (std::this_thread::get_id() == worker_.get_id() && enqueued_.empty()) communicator_->abort_device_transport();
  return first_cause();
}

Error Engine::first_cause() const {
  try {
    communicator_->liveness().throw_if_poisoned();
  } catch (const Error& cause) {
    return cause;
  }
  return Error(ErrorKind::kInternal, "a poisoned communicator has no cause");
}

// To peers that ask what this rank is doing. Only a message for which the program stands still keeps it from the rest.
void Engine::tell_awaited_message() {
  int peer = -1;
  for (const InFlight& operation : in_flight_) {
    if (!operation.task.work->has_waiter()) continue;
    peer = operation.task.peer;
    break;
  }
  communicator_->liveness().now_awaits_message(peer);
}

// Posts what can be posted without waiting for a connection; true if anything was. A peer that is connected during the
// pass counts from the next one on, so that its messages keep their order.
bool Engine::post_in_flight() {
  if (num_unposted_ == 0) return false;
  unconnected_.clear();
  bool posted = false;
  for (InFlight& operation : in_flight_) {
    const int peer = operation.task.peer;
    if (operation.is_posted || std::find(unconnected_.begin(), unconnected_.end(), peer) != unconnected_.end())
      continue;
    if (communicator_->awaits_channel(peer)) {
      unconnected_.push_back(peer);
      continue;
    }
    post(operation);
    posted = true;
  }
  return posted;
}

void Engine::post(InFlight& operation) {
  const Task& task = operation.task;
  operation.stream = stream_behind(task.place);
  communicator_->begin(task.operation, operation.deadline, {}, operation.stream);
  if (task.is_send) {
    communicator_->post_send(task.peer, task.data, task.bytes, &operation.request);
  } else {
    communicator_->post_recv(task.peer, task.data, task.bytes, &operation.request);
  }
  communicator_->end();
  operation.is_posted = true;
  --num_unposted_;
}

// Posts what can be posted and completes what has arrived; true if anything was. Fails everything when the communicator
// is poisoned or a deadline has passed.
bool Engine::complete_in_flight() {
  try {
    bool advanced = post_in_flight();
    advanced = communicator_->progress() || advanced;
    for (auto it = in_flight_.begin(); it != in_flight_.end();) {
      if (it->request.done.load(std::memory_order_acquire)) {
        if (it->stream.is_cpu()) {
          complete(it->task);
        } else {
          auto done = device::recorded_event(it->stream);
          note_enqueued({std::move(it->task), it->deadline, std::move(done), {}, false, it->begin_ns, 0, 0, {}});
        }
        it = in_flight_.erase(it);
        advanced = true;
        continue;
      }
      if (it->deadline.expired() || communicator_->has_departed(it->task.peer)) {
        // Raises, naming the peer and what it is doing; or what the peer sent before it left is still on its way.
        if (!it->is_posted) post(*it);
        communicator_->begin(it->task.operation, it->deadline, {}, it->stream);
        communicator_->wait(it->request);
        communicator_->end();
      }
      ++it;
    }
    if (in_flight_.empty()) {  // said while the token is held: next it may wait for a collective
      communicator_->liveness().now_awaits_message(-1);
      communicator_->no_message_is_under_way();
    }
    return advanced;
  } catch (...) {
    fail_in_flight(poison_with_current_exception());
    return true;
  }
}

void Engine::fail_in_flight(const Error& cause) {
  if (in_flight_.empty()) return;  // always so on a thread that runs inline: it may look, not touch
  for (auto& operation : in_flight_) {
    device::SharedEvent done;
    try {
      if (operation.is_posted && !operation.stream.is_cpu()) done = device::recorded_event(operation.stream);
    } catch (const Error&) {  // a device that is lost
    }
    fail(operation.task, cause, std::move(done));
  }
  in_flight_.clear();
  num_unposted_ = 0;
}

void Engine::abort_pending() {
  const size_t pending = counts_->outstanding.load(std::memory_order_relaxed);
  if (pending == 0) return;
  communicator_->liveness().poison(Error(
      ErrorKind::kAborted,
      "rank " + std::to_string(communicator_->rank()) + " destroyed the group '" + communicator_->name() + "' with " +
          std::to_string(pending) + (pending == 1 ? " operation" : " operations") + " pending; wait for them first",
      communicator_->rank()));
}

void Engine::close() {
  if (is_inherited()) return;
  if (std::this_thread::get_id() == worker_.get_id()) {
    throw Error(ErrorKind::kInvalidArgument,
                "a callback of an operation destroys the group '" + communicator_->name() +
                    "', whose thread calls it; destroy it from another one",
                communicator_->rank());
  }
  std::lock_guard closing(close_mutex_);
  if (!worker_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  abort_pending();
  wake_worker();
  worker_.join();
  communicator_->close();
}

}  // namespace bagua

// Engine: runs the operations of one group, one after the other in submission order, on its worker thread
// ("bagua-<group>"), and turns what goes wrong into the first cause that every later call raises.
//
// A blocking call on an idle engine runs on the calling thread instead (run_inline): two thread switches
// less. Whoever runs an operation holds the `running_` token; only the holder touches the communicator's verbs.
// Point-to-point operations are posted in order per peer and complete when they can, so that two ranks may both
// send before they receive, and one whose peer is not connected yet holds up no other.
//
// Operations on a device run on the worker, which enqueues them on a stream of the group's own, behind the caller's
// ready event. They end when the device has come to their end: the worker looks while it waits for other things.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/collectives/collectives.h"
#include "csrc/common/event_log.h"
#include "csrc/common/fork_guard.h"
#include "csrc/communicator/communicator.h"
#include "csrc/device/workspace.h"
#include "csrc/engine/device_side.h"
#include "csrc/engine/work.h"

namespace bagua {

class Engine {
 public:
  using Run = std::function<uint64_t(Context&)>;  // returns the number of non-finite blocks
  using Timeout = std::chrono::nanoseconds;

  // The point at which an operation's tensors are ready on a device: the one that `ready` marks. Of the CPU: now.
  struct Place {
    Device device;
    device::SharedEvent ready;
  };

  explicit Engine(std::unique_ptr<Communicator> communicator, const collectives::Thresholds& thresholds = {});
  ~Engine();

  Communicator& communicator() { return *communicator_; }
  EventLog& events() { return events_; }
  uint64_t workspace_bytes() const { return workspace_bytes_.load(std::memory_order_relaxed); }
  // Whether every operation that was submitted has ended. [any thread]
  bool is_idle() const { return num_unended_.load(std::memory_order_relaxed) == 0; }

  // Queues a collective; `operation.sequence` is filled in here. `bytes` is for the event log.
  std::shared_ptr<Work> submit(Operation operation, uint64_t bytes, Timeout timeout, Run run, Place place = {});
  // The same for a caller that will wait for it at once; the work it returns may be completed already. If it runs on
  // the calling thread, `interrupt` is called there now and then (Communicator::Interrupt).
  std::shared_ptr<Work> run_inline(Operation operation, uint64_t bytes, Timeout timeout, Run run,
                                   Communicator::Interrupt interrupt = {});
  std::shared_ptr<Work> submit_send(int peer, const void* data, uint64_t bytes, Operation operation, Timeout timeout,
                                    Place place = {});
  std::shared_ptr<Work> submit_recv(int peer, void* data, uint64_t bytes, Operation operation, Timeout timeout,
                                    Place place = {});

  // Poisons the group, which is about to be closed, if operations are pending. One on a device for which a stream waits
  // is not: its caller has waited for it, and close() lets it end. [any thread]
  void abort_pending();
  // Ends the worker; what is still queued fails with Aborted. Leaves the group. Idempotent. In a forked child,
  // which has no worker, it does nothing; there an Engine must not be destroyed (fork_guard.h).
  void close();
  bool is_inherited() const { return generation_ != process_generation(); }

 private:
  struct Task {
    std::shared_ptr<Work> work;
    Operation operation;
    uint64_t bytes = 0;
    Timeout timeout{};
    Run run;  // empty for point-to-point
    Communicator::Interrupt interrupt;
    int peer = -1;
    bool is_send = false;
    void* data = nullptr;
    int64_t submitted_ns = 0;
    Place place;
  };
  // A point-to-point operation, from its turn in the queue to its end.
  struct InFlight {
    InFlight(Task task_, Deadline deadline_) : task(std::move(task_)), deadline(deadline_) {}
    Task task;
    Deadline deadline;
    bool is_posted = false;
    Stream stream;  // of a device: its own, behind the ready event, once it is posted
    int64_t begin_ns = EventLog::now_ns();
    Request request;
  };
  // An operation on a device, from its enqueuing to its end.
  struct Enqueued {
    Task task;
    Deadline deadline;
    device::SharedEvent done;       // behind all of it
    DeviceSide::Interval interval;  // null of a message, which the log does not have
    bool waits_for_some = false;
    int64_t begin_ns = 0;
    uint64_t bytes_sent = 0;
    uint64_t network_bytes_sent = 0;
    DeviceTurns::Enqueued before;  // its turn on the device
  };
  // An operation that has failed while its device was late, and uses what it keeps until `done`.
  struct Late {
    std::shared_ptr<Work> work;
    device::SharedEvent done;
  };
  Task make_task_locked(Operation operation, uint64_t bytes, Timeout timeout, Place place = {});
  std::shared_ptr<Work> refuse_locked();
  std::shared_ptr<Work> submit_point_to_point(bool is_send, int peer, void* data, uint64_t bytes, Operation operation,
                                              Timeout timeout, Place place);
  void loop();
  bool advance();
  void wake_worker();
  bool take(Task& task);
  void release_token();
  void execute(Task& task);
  DeviceSide& side_of(Device device);
  Stream stream_behind(const Place& place);
  void note_enqueued(Enqueued&& operation);
  device::SharedEvent wait_for_leftovers(Device device);
  bool complete_enqueued();
  void log_device_operation(const Enqueued& operation);
  bool complete_done();
  std::optional<Error> cause_to_give_up();
  void expect_in_time(const Enqueued& operation);
  bool waits_for_peers(const Enqueued& operation) const;
  std::chrono::nanoseconds idle_sleep() const;
  uint64_t device_workspace_bytes() const;
  void complete(Task& task, uint64_t nonfinite_blocks = 0, uint64_t bytes_sent = 0, uint64_t network_bytes_sent = 0);
  void fail(Task& task, const Error& cause, device::SharedEvent done = nullptr);
  void release_late();
  void tell_awaited_message();
  bool post_in_flight();
  void post(InFlight& operation);
  bool complete_in_flight();
  void dial_probed();
  void fail_in_flight(const Error& cause);
  Error poison_with_current_exception();
  Error first_cause() const;

  const uint32_t generation_ = process_generation();
  std::unique_ptr<Communicator> communicator_;
  const collectives::Thresholds thresholds_;
  Workspace workspace_;                                    // holder of the token
  std::vector<std::unique_ptr<DeviceSide>> device_sides_;  // worker thread, as the next
  std::deque<Enqueued> enqueued_;
  std::vector<Late> late_;
  std::optional<Deadline> give_up_at_;        // once the group has failed
  std::optional<Deadline> cause_is_told_at_;  // once the device transport has
  EventLog events_;
  const std::shared_ptr<Work::Counts> counts_ = std::make_shared<Work::Counts>();
  std::atomic<uint64_t> workspace_bytes_{0};
  Doorbell idle_bell_{true};
  std::list<InFlight> in_flight_;  // worker thread, as the next two
  size_t num_unposted_ = 0;
  std::vector<int> unconnected_;  // peers, in one pass of post_in_flight

  std::atomic<size_t> num_unended_{0};
  std::mutex mutex_;  // guards the five below
  std::deque<Task> queue_;
  bool running_ = false;
  bool stopping_ = false;
  uint32_t next_sequence_ = 1;
  uint64_t next_ticket_ = 1;

  std::mutex close_mutex_;  // makes close() idempotent across threads
  std::thread worker_;      // joined by close()
};

}  // namespace bagua

// Communicator: the ranks of one group as its worker thread sees them. Owns the channels, waits for requests and keeps
// the deadline; which peers are alive, and the first cause of a failure, is in its Liveness.
//
// Threads: every method is for the worker thread except those marked [any thread]. The doorbell is the
// only point where the worker sleeps; whoever makes something happen for it rings (shared-memory peers
// through the mapped page, the reactor and the submitting threads directly).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/common/deadline.h"
#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/communicator/device_path.h"
#include "csrc/communicator/liveness.h"
#include "csrc/communicator/rehearsal.h"
#include "csrc/transport/device_transport.h"
#include "csrc/transport/transport.h"

namespace bagua {

class ControlLink;

class Communicator {
 public:
  // Called on the thread that runs the operation, or the worker's, when a peer is first used: has the link and the
  // channel to it made, which come by Process::attach and attach(), or Liveness::note_unreachable() says meanwhile why
  // not. Does not wait for them, so that no other message waits. Called again while there is no link, to find out anew
  // whether the peer's host is there. Opening and authenticating connections is Python's business.
  using Connector = std::function<void(int peer)>;
  // Called now and then while an operation waits; what it throws ends the operation. For Ctrl-C.
  using Interrupt = std::function<void()>;

  // `rings_here_only`: no peer is to get the descriptor of its doorbell, so there is none.
  Communicator(int rank, int size, std::string name, std::chrono::microseconds spin, bool rings_here_only = false);
  ~Communicator();

  int rank() const { return liveness_.ranks().rank; }
  int size() const { return liveness_.ranks().size; }
  const std::string& name() const { return liveness_.ranks().group; }
  // The links to the peers, and the first cause of a failure. [any thread]
  Liveness& liveness() { return liveness_; }

  // Brackets one operation: messages posted in between carry `operation` and move in the order of `stream`, waits end
  // at `deadline`.
  void begin(const Operation& operation, Deadline deadline, Interrupt interrupt = {}, Stream stream = {});
  void end();
  const Operation& operation() const { return operation_; }

  // True while the channel to a peer is being made, which this begins: posting to it would block.
  bool awaits_channel(int peer);

  // Message verbs. `Request` must outlive its completion; see transport.h. What is posted between begin_batch and
  // end_batch may move as one: with a device transport it is enqueued by end_batch, and done once it is, since the
  // stream orders what follows. So waits stand behind end_batch. A batch that is open stays it; elsewhere no-ops.
  void begin_batch() {
    if (over_ != nullptr) is_batching_ = true;
  }
  void end_batch() {
    if (over_ != nullptr) enqueue_batch();
  }
  void post_send(int peer, const void* data, size_t bytes, Request* request);
  void post_recv(int peer, void* data, size_t bytes, Request* request);
  void wait(Request& request);
  // Blocking conveniences.
  void send(int peer, const void* data, size_t bytes);
  void recv(int peer, void* data, size_t bytes);
  void send_recv(int to, const void* data, size_t bytes, int from, void* into, size_t into_bytes);

  // A collective of the whole group by a device transport: whether it does that in the running operation, and that.
  bool has_native(OperationKind kind, DType dtype, ReduceOp op = ReduceOp::kSum) const {
    return over_ != nullptr && over_->has(kind, dtype, op);
  }
  void enqueue_native(const NativeCollective& collective);

  // Sets the stream of a staged operation on a device: messages move in the order of `stream` from here on, and are the
  // host's if it is the CPU's; and the host waits for what the device has to do before.
  bool is_staged() const { return over_ == nullptr; }
  void use_stream(Stream stream) { stream_ = stream; }
  void wait_for_device(const std::function<bool()>& is_done);

  // Shared memory. True when this rank and the peer can address one another's; never where messages are a device's.
  bool shares_memory(int peer);
  // The address by which peers can map [data, data + bytes) in the running operation, if it lies in shared memory.
  std::optional<Address> address_of(const void* data, size_t bytes);
  void* resolve(int peer, const Address& address, size_t bytes);
  // Persistent memory of at least `bytes` that the peers can map; the same block every time (grown).
  void* staging(size_t bytes);

  // Moves what can be moved on the channels that something was posted to; true if anything moved. Throws the first
  // cause.
  bool progress();
  // Whether, when progress() last looked, something was under way that rings no bell (a device's copies).
  bool is_polled() const { return is_polled_; }
  Doorbell& doorbell() { return *doorbell_; }

  void set_connector(Connector connector);
  // How messages of device memory travel; without, they are refused. Before the first one.
  void set_device_channels(MakeDeviceChannel make) { make_device_channel_ = std::move(make); }
  // Sets what may move device memory of the whole group instead. Before the first operation on a device.
  void set_device_transport(std::shared_ptr<DeviceTransportSource> source, DeviceChoice asked);
  // Describes the way that collectives on a device go, as DevicePath::description has it. [any thread]
  std::string device_path() const { return device_path_ ? device_path_->description() : ""; }
  // Called by the worker. The work that was enqueued on a device transport may wait for peers: whether there is one;
  // throws what it reports; ends what is enqueued, and itself.
  bool has_device_transport() const { return device_path_ != nullptr && device_path_->transport() != nullptr; }
  void check_device_transport() { device_path_->transport()->check(); }
  // From begin() to end(); see DevicePath.
  DeviceTurns::Enqueued before_on_device() const {
    return device_path_ ? device_path_->before() : DeviceTurns::Enqueued{};
  }
  void abort_device_transport() noexcept {
    if (has_device_transport()) device_path_->transport()->abort();
  }
  // Called in every round of a wait, by the thread that waits.
  void set_while_waiting(std::function<void()> look) { while_waiting_ = std::move(look); }
  // There are no peers: messages are written down and not sent. Before the first operation.
  void rehearse() { rehearsal_ = std::make_unique<Rehearsal>(); }
  // Null otherwise. [any thread]
  const Rehearsal* rehearsal() const { return rehearsal_.get(); }
  void set_same_host(std::vector<bool> same_host) { same_host_ = std::move(same_host); }
  // Without a `control`, the link to the peer's process must be there. [any thread]
  void attach(int peer, std::unique_ptr<Channel> channel, std::shared_ptr<ControlLink> control = {});
  // A peer that has left, and whose channel will not tell that nothing more comes: a wait for it finds out.
  bool has_departed(int peer) const;  // [any thread], before close()
  bool is_attached(int peer) const;   // [any thread]

  // Forgets every posted request of every channel, so that their memory can be freed.
  void cancel();
  // Ends an operation that has failed, as end() does, and takes from the peers what they could write to in it.
  // One that was stopped may go on long after.
  void end_and_isolate();
  // Tells the peers that this rank leaves, and closes; after it only the destructor may be called.
  void close();

  // Counts bytes of collectives that move them through shared memory instead of messages.
  void count_moved(uint64_t sent, uint64_t received) {
    bytes_sent_.fetch_add(sent, std::memory_order_relaxed);
    bytes_received_.fetch_add(received, std::memory_order_relaxed);
  }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }  // [any thread]
  // The bytes among them that went over a network, not through shared memory.
  uint64_t network_bytes_sent() const { return network_bytes_sent_.load(std::memory_order_relaxed); }  // [any thread]
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }          // [any thread]

  void no_message_is_under_way() { has_messages_ = false; }

 private:
  struct Peer {
    std::atomic<bool> is_wanted{false};      // the connector was called
    bool is_active = false;                  // in active_
    std::atomic<Channel*> channel{nullptr};  // published last; points into `owned`
    std::unique_ptr<Channel> owned;          // guarded by attach_mutex_
    std::unique_ptr<Channel> over_owned;     // for device memory, once there is some; then `channel` points to it
  };

  Channel& channel(int peer);
  void activate(int peer);
  void deactivate_all();
  void want(int peer);
  Channel& device_channel(int peer);
  Channel& channel_for(Request* request, int peer);
  template <typename Ready>
  void wait_until(int peer, Ready ready);
  void advance(int peer, Channel& channel, bool& moved);
  void await_cause(int peer);
  template <typename What>
  void enqueue_over(const What& what);
  void post_over(const DeviceMessage& message, Request* request);
  void enqueue_batch();
  void forget_batch();
  void count_sent(uint64_t bytes, bool over_network);
  bool is_on_this_host(int peer) const;
  void post_note(bool is_send, int peer, uint8_t* note, size_t bytes, Request* request);
  void exchange_notes(void* notes, size_t note_bytes);
  void exchange_notes_pairwise(uint8_t* notes, size_t note_bytes);
  void disseminate_notes(uint8_t* notes, size_t note_bytes);
  void pause_for_device(const char* doing);
  void release_staging();
  void conceal(bool isolates);
  void check_interrupt();
  [[noreturn]] void deadline_exceeded(int peer);

  const std::chrono::microseconds spin_;
  std::unique_ptr<Doorbell> doorbell_;
  Liveness liveness_;
  std::mutex attach_mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; the own entry stays empty
  std::vector<bool> same_host_;               // empty when unknown: then connected channels decide
  Connector connector_;

  // Peers to whose channels something was posted in the running operation, or by a message that may be under way: the
  // others' need no look.
  std::vector<int> active_;
  bool has_messages_ = false;  // such messages
  Operation operation_;
  std::optional<Deadline> deadline_;
  Interrupt interrupt_;
  Stream stream_;
  MakeDeviceChannel make_device_channel_;
  std::unique_ptr<DevicePath> device_path_;  // null: staged
  DeviceTransport* over_ = nullptr;          // of the running operation, if it moves over one
  std::vector<DeviceMessage> batch_;         // posted and not enqueued, with their requests
  std::vector<Request*> batched_;
  bool is_batching_ = false;
  std::function<void()> while_waiting_;
  std::unique_ptr<Rehearsal> rehearsal_;  // null: there are peers
  bool has_device_channels_ = false;
  bool is_polled_ = false;  // whether a channel was, when progress() last looked
  Deadline::Clock::time_point last_interrupt_check_;
  std::vector<uint64_t> exposed_;  // segments of the program that peers may write to in the running operation
  void* staging_ = nullptr;
  size_t staging_bytes_ = 0;

  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> network_bytes_sent_{0};
  std::atomic<uint64_t> bytes_received_{0};
};

}  // namespace bagua

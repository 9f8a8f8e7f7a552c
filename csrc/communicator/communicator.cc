// Connections, what is under way, and how the worker waits for it (spins, sleeps on the doorbell, asks now and then),
// see communicator.h.
#include "csrc/communicator/communicator.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include <sched.h>

#include "csrc/common/shared_segments.h"
#include "csrc/communicator/control_link.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// No thread sleeps longer than this without looking at the deadline and at the poison.
constexpr nanoseconds kMaxSleep = milliseconds(100);
// After a peer has left, how long what it sent before may take to arrive.
constexpr nanoseconds kDepartureGrace = milliseconds(300);
// When a connection breaks, how long the reason may take to arrive on the control link.
constexpr nanoseconds kCauseGrace = milliseconds(300);
// Ranks that call different things may all wait for one another, and no message ever shows it. So who has waited for
// this long asks the peer what it is doing; later requests come at doubling intervals.
constexpr nanoseconds kFirstRequestDelay = milliseconds(500);
constexpr nanoseconds kMaxRequestInterval = milliseconds(8000);
// How long a device transport may take to end where nothing went wrong.
constexpr std::chrono::seconds kCloseLimit{3};
// Up to this many ranks every rank sends every rank a note.
constexpr int kMaxPairwiseNotes = 8;
// How soon to look again where a device works, which rings no bell.
constexpr nanoseconds kPollInterval = std::chrono::microseconds(50);
// Looking for a signal takes Python's lock, so it is not done at every wake-up.
constexpr nanoseconds kInterruptInterval = milliseconds(50);

// From here on, or from where it would sleep, a thread of the program that spins yields: what it waits for may need the
// same CPU core. It spins a little longer then. A worker does not: in its process others compute, which would keep the
// core for long.
constexpr nanoseconds kUndisturbedSpin = std::chrono::microseconds(5);
constexpr nanoseconds kYieldingSpin = std::chrono::microseconds(10);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Communicator::Communicator(int rank, int size, std::string name, std::chrono::microseconds spin, bool rings_here_only)
    : spin_(spin),
      doorbell_(std::make_unique<Doorbell>(rings_here_only)),
      liveness_(rank, size, std::move(name), *doorbell_) {
  for (int i = 0; i < size; ++i) peers_.push_back(std::make_unique<Peer>());
}

Communicator::~Communicator() {
  liveness_.leave_process();
  liveness_.stop_links();
  peers_.clear();
  release_staging();
}

void Communicator::release_staging() {
  if (staging_ != nullptr) SegmentRegistry::instance().release(std::exchange(staging_, nullptr));
  staging_bytes_ = 0;
}

void Communicator::set_connector(Connector connector) {
  connector_ = std::move(connector);
  liveness_.set_dial([this](int peer) {
    peers_[static_cast<size_t>(peer)]->is_wanted.store(true, std::memory_order_relaxed);
    connector_(peer);
  });
}

void Communicator::begin(const Operation& operation, Deadline deadline, Interrupt interrupt, Stream stream) {
  liveness_.begin(operation);
  operation_ = operation;
  deadline_ = deadline;
  interrupt_ = std::move(interrupt);
  stream_ = stream;
  last_interrupt_check_ = Deadline::Clock::now();
  if (rehearsal_) rehearsal_->begin();
  if (!has_messages_) deactivate_all();
  has_messages_ = has_messages_ || operation.kind == OperationKind::kPointToPoint;
  // Messages of two ranks stay on the channels: a device transport would hold up all others until both have come.
  if (!stream.is_cpu() && device_path_ && size() > 1 && operation.kind != OperationKind::kPointToPoint) {
    over_ = device_path_->enter(stream);
  }
}

void Communicator::end() {
  interrupt_ = {};
  if (rehearsal_) rehearsal_->end();
  over_ = nullptr;
  if (device_path_) device_path_->leave(stream_);
  conceal(false);
  liveness_.end(std::exchange(operation_, Operation{}));
}

Channel& Communicator::channel_for(Request* request, int peer) {
  Channel& found = stream_.is_cpu() ? channel(peer) : device_channel(peer);
  activate(peer);
  request->peer = peer;
  request->stream = stream_;
  request->done.store(false, std::memory_order_relaxed);
  return found;
}

void Communicator::post_send(int peer, const void* data, size_t bytes, Request* request) {
  // const_cast: a send only reads. Notes stay on the channels.
  if (rehearsal_) {
    rehearsal_->post(true, peer, const_cast<void*>(data), bytes, request);
    return count_sent(bytes, !is_on_this_host(peer));
  }
  if (over_ != nullptr && bytes > 0) return post_over({true, peer, const_cast<void*>(data), bytes}, request);
  Channel& to = channel_for(request, peer);
  to.post_send(operation_, data, bytes, request);
  count_sent(bytes, !to.shares_memory());
}

void Communicator::count_sent(uint64_t bytes, bool over_network) {
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  if (over_network) network_bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
}

void Communicator::post_recv(int peer, void* data, size_t bytes, Request* request) {
  if (rehearsal_) {
    rehearsal_->post(false, peer, data, bytes, request);
    bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  if (over_ != nullptr && bytes > 0) return post_over({false, peer, data, bytes}, request);
  channel_for(request, peer).post_recv(operation_, data, bytes, request);
  bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
}

void Communicator::send(int peer, const void* data, size_t bytes) {
  Request request;
  try {
    begin_batch();
    post_send(peer, data, bytes, &request);
    end_batch();
    wait(request);
  } catch (...) {
    cancel();
    throw;
  }
}

void Communicator::recv(int peer, void* data, size_t bytes) {
  Request request;
  try {
    begin_batch();
    post_recv(peer, data, bytes, &request);
    end_batch();
    wait(request);
  } catch (...) {
    cancel();
    throw;
  }
}

void Communicator::send_recv(int to, const void* data, size_t bytes, int from, void* into, size_t into_bytes) {
  Request receiving, sending;
  try {
    begin_batch();
    post_recv(from, into, into_bytes, &receiving);
    post_send(to, data, bytes, &sending);
    end_batch();
    wait(receiving);
    wait(sending);
  } catch (...) {
    cancel();
    throw;
  }
}

// Spins, then sleeps on the doorbell, until ready() or an error. `peer` is whom to blame.
template <typename Ready>
void Communicator::wait_until(int peer, Ready ready) {
  const auto begin = Deadline::Clock::now();
  liveness_.now_waiting_for(peer, begin);
  const nanoseconds spin = interrupt_ && spin_.count() > 0 ? std::max<nanoseconds>(spin_, kYieldingSpin) : spin_;
  const nanoseconds undisturbed = std::min<nanoseconds>(spin_, kUndisturbedSpin);
  auto spin_until = begin + spin, yield_from = begin + undisturbed;
  Deadline::Clock::time_point quiet_since{};  // since a departed peer's bytes have stopped to come; 0: not departed
  nanoseconds request_interval = kFirstRequestDelay;
  auto next_request = begin + request_interval;
  for (;;) {
    if (while_waiting_) while_waiting_();
    const bool moved = progress();
    if (ready()) {
      liveness_.stop_waiting();
      return;
    }
    if (moved) {
      if (deadline_->expired()) deadline_exceeded(peer);
      const auto now = Deadline::Clock::now();
      spin_until = now + spin;
      yield_from = now + undisturbed;
      quiet_since = {};
      next_request = Deadline::Clock::now() + request_interval;
      continue;
    }
    const auto now = Deadline::Clock::now();
    if (now < spin_until) {
      if (now < yield_from || !interrupt_) {
        for (int i = 0; i < 32; ++i) pause_cpu();
      } else {
        sched_yield();
      }
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
    doorbell_->sleep(epoch, std::min(is_polled_ ? kPollInterval : kMaxSleep, deadline_->remaining() + nanoseconds(1)));
    check_interrupt();
    liveness_.dial_probed();
    if (deadline_->expired()) deadline_exceeded(peer);
    liveness_.compare_answer(peer);
    if (Deadline::Clock::now() > next_request) {
      liveness_.request_status(peer);
      request_interval = std::min(2 * request_interval, kMaxRequestInterval);
      next_request = Deadline::Clock::now() + request_interval;
    }
    if (has_departed(peer)) {
      const auto now = Deadline::Clock::now();
      if (quiet_since == Deadline::Clock::time_point{}) quiet_since = now;
      if (now - quiet_since > kDepartureGrace) liveness_.throw_left(peer);
    }
  }
}

// The program's own work comes first there, so no other rank is to blame if it is late.
void Communicator::wait_for_device(const std::function<bool()>& is_done) {
  liveness_.stop_waiting();
  const auto spin_until = Deadline::Clock::now() + spin_;
  while (!is_done()) {
    if (while_waiting_) while_waiting_();
    if (deadline_->expired()) {
      liveness_.throw_late(rank(),
                           device_name(stream_.device) + " of rank " + std::to_string(rank()) +
                               " is still busy with what it had to do before",
                           deadline_->allowed_seconds());
    }
    if (progress()) continue;
    if (Deadline::Clock::now() < spin_until) {
      for (int i = 0; i < 32; ++i) pause_cpu();
      continue;
    }
    const uint32_t epoch = doorbell_->prepare();
    doorbell_->sleep(epoch, kPollInterval);
    check_interrupt();
    liveness_.dial_probed();
  }
}

void Communicator::wait(Request& request) {
  if (request.done.load(std::memory_order_acquire)) return;
  assert(batch_.empty() && "a wait stands in a batch");
  if (rehearsal_) return rehearsal_->wait(request);
  wait_until(request.peer, [&] { return request.done.load(std::memory_order_acquire); });
}

void* Communicator::resolve(int peer, const Address& address, size_t bytes) {
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
bool Communicator::progress() {
  const bool poisoned =
      liveness_.is_poisoned();  // before the look at the channels, which then hold all that came before it
  bool moved = false;
  is_polled_ = false;
  for (const int peer : active_) {
    Channel& c = *peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_relaxed);
    advance(peer, c, moved);
    if (has_device_channels_) is_polled_ = is_polled_ || c.is_polled();
  }
  if (poisoned && !moved) liveness_.throw_if_poisoned();
  return moved;
}

void Communicator::activate(int peer) {
  if (std::exchange(peers_[static_cast<size_t>(peer)]->is_active, true)) return;
  active_.push_back(peer);
}

void Communicator::deactivate_all() {
  for (const int peer : active_) peers_[static_cast<size_t>(peer)]->is_active = false;
  active_.clear();
}

void Communicator::advance(int peer, Channel& channel, bool& moved) {
  try {
    if (channel.progress()) moved = true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTransport) await_cause(peer);
    throw;
  }
}

// A broken connection is often only the consequence of something that its peer has told, or is about to tell, on the
// control link (it failed for another reason, or left): then that is the cause, and is thrown.
void Communicator::await_cause(int peer) {
  const Deadline grace = Deadline::after(kCauseGrace);
  while (!grace.expired() && !liveness_.is_poisoned()) {
    if (peer >= 0 && liveness_.has_left(peer)) liveness_.throw_left(peer);
    const uint32_t epoch = doorbell_->prepare();
    doorbell_->sleep(epoch, milliseconds(5));
  }
  liveness_.throw_if_poisoned();
}

void Communicator::deadline_exceeded(int peer) {
  if (has_departed(peer)) liveness_.throw_left(peer);
  liveness_.raise_late(peer, deadline_->allowed_seconds(), [this] { check_interrupt(); });
}

void Communicator::check_interrupt() {
  if (!interrupt_) return;
  const auto now = Deadline::Clock::now();
  if (now - last_interrupt_check_ < kInterruptInterval) return;
  last_interrupt_check_ = now;
  interrupt_();
}

Channel& Communicator::channel(int peer) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  Channel* found = p.channel.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  liveness_.throw_if_poisoned();
  if (!connector_) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer) + " is not connected", peer);
  }
  want(peer);
  wait_until(peer, [&] { return (found = p.channel.load(std::memory_order_acquire)) != nullptr; });
  return *found;
}

void Communicator::want(int peer) {
  if (!peers_[static_cast<size_t>(peer)]->is_wanted.exchange(true, std::memory_order_relaxed)) connector_(peer);
}

bool Communicator::awaits_channel(int peer) {
  if (!connector_ || is_attached(peer)) return false;
  want(peer);
  return !is_attached(peer);
}

bool Communicator::shares_memory(int peer) {
  if (!stream_.is_cpu() || rehearsal_) return false;
  if (!same_host_.empty() && !same_host_[static_cast<size_t>(peer)]) return false;
  return channel(peer).shares_memory();
}

// The peer's channel, made to move device memory unless it does.
Channel& Communicator::device_channel(int peer) {
  Channel& found = channel(peer);
  if (found.moves_device_memory()) return found;
  if (!make_device_channel_) {
    throw Error(ErrorKind::kInternal,
                std::string("the ") + found.kind() + " transport moves host memory; device memory must be staged",
                peer);
  }
  Peer& p = *peers_[static_cast<size_t>(peer)];
  p.over_owned = make_device_channel_(found);
  has_device_channels_ = true;
  p.channel.store(p.over_owned.get(), std::memory_order_release);
  return *p.over_owned;
}

// ---- over a device transport

void Communicator::set_device_transport(std::shared_ptr<DeviceTransportSource> source, DeviceChoice asked) {
  device_path_ = std::make_unique<DevicePath>(
      std::move(source), asked,
      DevicePath::Group{liveness_.ranks(), liveness_.key(),
                        [this](void* notes, size_t note_bytes) { exchange_notes(notes, note_bytes); },
                        [this](const char* doing) { pause_for_device(doing); }});
}

void Communicator::post_over(const DeviceMessage& message, Request* request) {
  request->peer = message.peer;
  request->stream = stream_;
  request->done.store(false, std::memory_order_relaxed);
  batch_.push_back(message);
  batched_.push_back(request);
  if (message.is_send) {
    count_sent(message.bytes, !is_on_this_host(message.peer));
  } else {
    bytes_received_.fetch_add(message.bytes, std::memory_order_relaxed);
  }
  if (!is_batching_) enqueue_batch();
}

template <typename What>
void Communicator::enqueue_over(const What& what) {
  liveness_.throw_if_poisoned();
  try {
    over_->enqueue(what, stream_, [this](const char* doing) { pause_for_device(doing); });
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTransport) await_cause(error.rank());
    throw;
  }
}

void Communicator::enqueue_batch() {
  is_batching_ = false;
  if (batch_.empty()) return;
  enqueue_over(batch_);
  for (Request* request : batched_) request->done.store(true, std::memory_order_release);
  forget_batch();
}

void Communicator::forget_batch() {
  is_batching_ = false;
  batch_.clear();
  batched_.clear();
}

// Counts what a ring or a chain of the ranks would send: how it moves bytes, the transport does not tell.
void Communicator::enqueue_native(const NativeCollective& collective) {
  enqueue_over(collective);
  const int num_ranks = size();
  const auto count = static_cast<uint64_t>(num_ranks);
  const uint64_t bytes = collective.numel * item_bytes(collective.dtype);
  const int before = (collective.root + num_ranks - 1) % num_ranks;
  uint64_t sent = (count - 1) * bytes, received = sent;
  switch (collective.kind) {
    case OperationKind::kAllReduce: sent = received = 2 * (count - 1) * bytes / count; break;
    case OperationKind::kBroadcast:
      sent = rank() == before ? 0 : bytes;
      received = rank() == collective.root ? 0 : bytes;
      break;
    case OperationKind::kReduce:
      sent = rank() == collective.root ? 0 : bytes;
      received = rank() == (collective.root + 1) % num_ranks ? 0 : bytes;
      break;
    default: break;
  }
  count_sent(sent, !is_on_this_host((rank() + 1) % num_ranks));
  bytes_received_.fetch_add(received, std::memory_order_relaxed);
}

bool Communicator::is_on_this_host(int peer) const {
  if (!same_host_.empty()) return same_host_[static_cast<size_t>(peer)];
  const Channel* c = peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire);
  return c != nullptr && c->shares_memory();
}

void Communicator::exchange_notes(void* notes, size_t note_bytes) {
  if (size() <= kMaxPairwiseNotes) {
    exchange_notes_pairwise(static_cast<uint8_t*>(notes), note_bytes);
  } else {
    disseminate_notes(static_cast<uint8_t*>(notes), note_bytes);
  }
}

// A message of the host in an operation on a device.
void Communicator::post_note(bool is_send, int peer, uint8_t* note, size_t bytes, Request* request) {
  Channel& c = channel(peer);
  activate(peer);
  request->peer = peer;
  request->stream = {};
  request->done.store(false, std::memory_order_relaxed);
  if (is_send) {
    c.post_send(operation_, note, bytes, request);
  } else {
    c.post_recv(operation_, note, bytes, request);
  }
}

void Communicator::exchange_notes_pairwise(uint8_t* notes, size_t note_bytes) {
  Request requests[2 * kMaxPairwiseNotes];
  size_t num_posted = 0;
  try {
    for (int step = 1; step < size(); ++step) {
      const int from = (rank() + size() - step) % size(), to = (rank() + step) % size();
      post_note(false, from, notes + static_cast<size_t>(from) * note_bytes, note_bytes, &requests[num_posted++]);
      post_note(true, to, notes + static_cast<size_t>(rank()) * note_bytes, note_bytes, &requests[num_posted++]);
    }
    for (size_t i = 0; i < num_posted; ++i) wait(requests[i]);
  } catch (...) {
    cancel();  // while the requests are there
    throw;
  }
}

// ceil(log2 n) steps: in each, all that a rank knows goes to the rank so far to the left, and as much comes from the
// right. Source: Bruck et al., "Efficient algorithms for all-to-all communications", 1997.
void Communicator::disseminate_notes(uint8_t* notes, size_t note_bytes) {
  const int size = this->size();
  std::vector<uint8_t> known(static_cast<size_t>(size) * note_bytes);  // from this rank on
  const auto at = [&](int index) { return known.data() + static_cast<size_t>(index) * note_bytes; };
  const auto of_rank = [&](int rank) { return notes + static_cast<size_t>(rank) * note_bytes; };
  if (note_bytes > 0) std::memcpy(at(0), of_rank(rank()), note_bytes);
  for (int distance = 1; distance < size; distance *= 2) {
    const int count = std::min(distance, size - distance);
    const size_t bytes = static_cast<size_t>(count) * note_bytes;
    Request receiving, sending;
    try {
      post_note(false, (rank() + distance) % size, at(distance), bytes, &receiving);
      post_note(true, (rank() + size - distance) % size, at(0), bytes, &sending);
      wait(receiving);
      wait(sending);
    } catch (...) {
      cancel();
      throw;
    }
  }
  for (int i = 0; i < size && note_bytes > 0; ++i) std::memcpy(of_rank((rank() + i) % size), at(i), note_bytes);
}

// Between two looks at what a device transport does. All ranks have come to the operation by then.
void Communicator::pause_for_device(const char* doing) {
  if (while_waiting_) while_waiting_();
  liveness_.dial_probed();
  liveness_.throw_if_poisoned();
  if (deadline_->expired()) {
    throw Error(ErrorKind::kDeadlineExceeded,
                std::string(doing) + " on " + device_name(stream_.device) + " of rank " + std::to_string(rank()) +
                    " was not done within " + std::to_string(deadline_->allowed_seconds()) + " s, in " +
                    describe(operation_) + ", which all ranks had begun",
                -1, std::string(operation_name(operation_.kind)));
  }
  const uint32_t epoch = doorbell_->prepare();
  doorbell_->sleep(epoch, kPollInterval);
}

std::optional<Address> Communicator::address_of(const void* data, size_t bytes) {
  for (int peer = 0; peer < size(); ++peer) {
    const Channel* c = peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire);
    if (c != nullptr && c->addresses_any_memory()) return Address{0, reinterpret_cast<uintptr_t>(data)};
  }
  auto& registry = SegmentRegistry::instance();
  const auto address = registry.find(data, bytes);
  if (address && data != staging_) {
    registry.expose(address->segment);
    exposed_.push_back(address->segment);
  }
  return address;
}

void* Communicator::staging(size_t bytes) {
  if (bytes <= staging_bytes_) return staging_;
  if (staging_ != nullptr) SegmentRegistry::instance().release(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
  try {
    staging_ = SegmentRegistry::instance().create(bytes);
  } catch (const Error& error) {
    throw of_rank(error, rank());
  }
  staging_bytes_ = bytes;
  return staging_;
}

void Communicator::attach(int peer, std::unique_ptr<Channel> channel, std::shared_ptr<ControlLink> control) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  {
    std::lock_guard lock(attach_mutex_);
    if (p.owned) {
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer) + " is connected twice", peer);
    }
    p.owned = std::move(channel);
  }
  if (control) liveness_.attach(peer, std::move(control));
  p.channel.store(p.owned.get(), std::memory_order_release);
  doorbell_->ring();
}

bool Communicator::has_departed(int peer) const {
  if (!liveness_.has_left(peer)) return false;
  const Channel* c = peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire);
  return c == nullptr || !c->reports_end();
}

bool Communicator::is_attached(int peer) const {
  return peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire) != nullptr;
}

void Communicator::cancel() {
  if (rehearsal_) rehearsal_->cancel();
  forget_batch();
  for (auto& peer : peers_) {
    Channel* c = peer->channel.load(std::memory_order_acquire);
    if (c != nullptr) c->cancel();
  }
}

void Communicator::conceal(bool isolates) {
  for (const uint64_t segment : exposed_) SegmentRegistry::instance().conceal(segment, isolates);
  exposed_.clear();
}

void Communicator::end_and_isolate() {
  conceal(true);
  end();
}

void Communicator::close() {
  liveness_.leave_process();
  if (has_device_transport()) {
    if (!liveness_.is_poisoned() && !liveness_.failure_of_process())
      device_path_->transport()->close(Deadline::after(kCloseLimit));
    abort_device_transport();
  }
  cancel();
  liveness_.say_goodbye();
  deactivate_all();
  // The peers' data connections end here, behind the last byte, and not when the last reference to the group goes.
  for (auto& peer : peers_) {
    peer->channel.store(nullptr, std::memory_order_release);
    peer->over_owned.reset();
    peer->owned.reset();
  }
  liveness_.drop_links();
  // Descriptors too: who looks at the timeline of a closed group may keep it for long.
  release_staging();
  doorbell_->close_fd();
}

}  // namespace bagua

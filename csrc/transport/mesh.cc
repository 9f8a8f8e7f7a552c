// Who is connected, what is under way, and the first cause; see mesh.h. Waiting is in mesh_waiting.cc, and whom
// to name for it in mesh_blame.cc.
#include "csrc/transport/mesh.h"

#include <utility>

#include "csrc/transport/control_link.h"
#include "csrc/transport/mesh_peer.h"
#include "csrc/transport/segment.h"

namespace bagua {

Mesh::Mesh(int rank, int size, std::string name, std::chrono::microseconds spin)
    : rank_(rank), size_(size), name_(std::move(name)), spin_(spin), doorbell_(std::make_unique<Doorbell>()) {
  for (int i = 0; i < size; ++i) peers_.push_back(std::make_unique<Peer>());
}

Mesh::~Mesh() {
  if (process_) process_->remove(this);
  for (auto& peer : peers_) {
    if (peer->control) peer->control->stop();
  }
  peers_.clear();
  release_staging();
}

void Mesh::release_staging() {
  if (staging_ != nullptr) SegmentRegistry::instance().release(std::exchange(staging_, nullptr));
  staging_bytes_ = 0;
}

void Mesh::join_process(std::shared_ptr<ProcessWaits> process, std::vector<int> job_ranks) {
  job_ranks_ = std::move(job_ranks);
  process_ = std::move(process);
  if (process_) process_->add(this);
}

void Mesh::begin(const Operation& operation, Deadline deadline, Interrupt interrupt, Stream stream) {
  throw_if_poisoned();
  if (process_) process_->forget_failure();  // who begins something has got over it
  operation_ = operation;
  deadline_ = deadline;
  interrupt_ = std::move(interrupt);
  stream_ = stream;
  last_interrupt_check_ = Deadline::Clock::now();
  std::lock_guard lock(mutex_);
  status_.operation = operation;
}

void Mesh::end() {
  interrupt_ = {};
  std::lock_guard lock(mutex_);
  if (operation_.sequence != 0) status_.last_finished = operation_;
  status_.operation = operation_ = Operation{};
  waiting_for_.store(-1, std::memory_order_relaxed);
  // What peers have freed while the operation ran; outside of operations on_released does it at once.
  for (auto& peer : peers_) {
    if (peer->control) peer->control->unmap_released();
  }
}

Channel& Mesh::channel_for(Request* request, int peer) {
  Channel& found = channel(peer);
  if (!stream_.is_cpu() && !found.moves_device_memory()) {
    throw Error(ErrorKind::kInternal,
                std::string("the ") + found.kind() + " transport moves host memory; device memory must be staged",
                peer);
  }
  request->peer = peer;
  request->stream = stream_;
  request->done.store(false, std::memory_order_relaxed);
  return found;
}

void Mesh::post_send(int peer, const void* data, size_t bytes, Request* request) {
  Channel& to = channel_for(request, peer);
  to.post_send(operation_, data, bytes, request);
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  if (!to.shares_memory()) network_bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
}

void Mesh::post_recv(int peer, void* data, size_t bytes, Request* request) {
  channel_for(request, peer).post_recv(operation_, data, bytes, request);
  bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
}

void Mesh::send(int peer, const void* data, size_t bytes) {
  Request request;
  post_send(peer, data, bytes, &request);
  try {
    wait(request);
  } catch (...) {
    cancel();
    throw;
  }
}

void Mesh::recv(int peer, void* data, size_t bytes) {
  Request request;
  post_recv(peer, data, bytes, &request);
  try {
    wait(request);
  } catch (...) {
    cancel();
    throw;
  }
}

void Mesh::send_recv(int to, const void* data, size_t bytes, int from, void* into, size_t into_bytes) {
  Request receiving, sending;
  try {
    post_recv(from, into, into_bytes, &receiving);
    post_send(to, data, bytes, &sending);
    wait(receiving);
    wait(sending);
  } catch (...) {
    cancel();
    throw;
  }
}

Channel& Mesh::channel(int peer) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  Channel* found = p.channel.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  throw_if_poisoned();
  if (!connector_) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer) + " is not connected", peer);
  }
  now_waiting_for(peer, Deadline::Clock::now());
  connector_(peer, *deadline_);
  waiting_for_.store(-1, std::memory_order_relaxed);
  found = p.channel.load(std::memory_order_acquire);
  if (found == nullptr) {
    throw Error(ErrorKind::kInternal, "connecting to rank " + std::to_string(peer) + " attached nothing", peer);
  }
  return *found;
}

bool Mesh::shares_memory(int peer) {
  if (!same_host_.empty() && !same_host_[static_cast<size_t>(peer)]) return false;
  return channel(peer).shares_memory();
}

std::optional<Address> Mesh::address_of(const void* data, size_t bytes) const {
  for (int peer = 0; peer < size_; ++peer) {
    const Channel* c = peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire);
    if (c != nullptr && c->addresses_any_memory()) return Address{0, reinterpret_cast<uintptr_t>(data)};
  }
  return SegmentRegistry::instance().find(data, bytes);
}

void* Mesh::staging(size_t bytes) {
  if (bytes <= staging_bytes_) return staging_;
  if (staging_ != nullptr) SegmentRegistry::instance().release(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
  staging_ = SegmentRegistry::instance().create(bytes);
  staging_bytes_ = bytes;
  return staging_;
}

void Mesh::attach(int peer, std::unique_ptr<Channel> channel, std::shared_ptr<ControlLink> control) {
  Peer& p = *peers_[static_cast<size_t>(peer)];
  {
    std::lock_guard lock(mutex_);
    if (p.owned) {
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer) + " is connected twice", peer);
    }
    p.owned = std::move(channel);
    p.control = control;
  }
  if (control) {
    ControlLink::Events events;
    events.on_abort = [this, peer](const Error& cause) {
      if (cause.kind() == ErrorKind::kRemote) {
        poison(cause);
      } else {
        // Who failed without naming anybody is to blame, except for a deadline: then nobody is.
        const bool names = cause.rank() >= 0 || cause.kind() == ErrorKind::kDeadlineExceeded;
        poison(Error(ErrorKind::kRemote, "rank " + std::to_string(peer) + " reported: " + cause.what(),
                     names ? cause.rank() : peer, cause.operation()));
      }
    };
    events.on_failure = [this](const Error& cause) { poison(cause); };
    events.on_lost = [this, peer](const std::string& how) {
      poison(Error(
          ErrorKind::kTransport,
          "rank " + std::to_string(peer) + " " + how +
              " without a goodbye: its process died or the network between the hosts failed; see the log of rank " +
              std::to_string(peer),
          peer, std::string(operation_name(status().operation.kind))));
    };
    events.on_goodbye = [this, &p](const std::optional<Error>& why) {
      {
        std::lock_guard lock(mutex_);
        p.why_left = why;
      }
      p.departed.store(true, std::memory_order_release);
      doorbell_->ring();
    };
    events.on_status = [this, peer](const PeerStatus& status) {
      keep_answer(peer, status);
      doorbell_->ring();
    };
    events.my_status = [this](const ControlLink::Question& question) { return answer(question); };
    events.on_segment = [this] { doorbell_->ring(); };
    events.on_released = [this, &p] {
      std::lock_guard lock(mutex_);
      if (status_.operation.kind == OperationKind::kNone) p.control->unmap_released();
    };
    control->start(std::move(events));
  }
  p.channel.store(p.owned.get(), std::memory_order_release);
  // Who connects to a group that has failed learns why at once. (A poisoning that comes after this look sees the link.)
  if (control && is_poisoned()) {
    std::optional<Error> cause;
    {
      std::lock_guard lock(mutex_);
      cause = cause_;
    }
    control->send_abort(*cause);
  }
  doorbell_->ring();
}

bool Mesh::has_departed(int peer) const {
  const Peer& p = *peers_[static_cast<size_t>(peer)];
  if (!p.departed.load(std::memory_order_acquire)) return false;
  const Channel* c = p.channel.load(std::memory_order_acquire);
  return c != nullptr && !c->reports_end();
}

bool Mesh::is_attached(int peer) const {
  return peers_[static_cast<size_t>(peer)]->channel.load(std::memory_order_acquire) != nullptr;
}

void Mesh::poison(const Error& cause, bool tell_peers) {
  std::vector<std::shared_ptr<ControlLink>> links;
  {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    for (auto& peer : peers_) {
      if (peer->control) links.push_back(peer->control);
    }
  }
  poisoned_.store(true, std::memory_order_release);
  if (tell_peers) {
    for (auto& link : links) link->send_abort(cause);
  }
  if (process_) {
    process_->note_failure(Error(cause.kind(), "in group '" + name_ + "': " + cause.what(),
                                 cause.rank() >= 0 ? job_rank(cause.rank()) : -1, cause.operation()));
  }
  doorbell_->ring();
}

void Mesh::throw_if_poisoned() const {
  if (!is_poisoned()) return;
  std::lock_guard lock(mutex_);
  throw Error(*cause_);
}

void Mesh::cancel() {
  for (auto& peer : peers_) {
    Channel* c = peer->channel.load(std::memory_order_acquire);
    if (c != nullptr) c->cancel();
  }
}

void Mesh::close() {
  std::optional<Error> why;
  if (process_) {
    process_->remove(this);
    why = process_->failure();
  }
  cancel();
  for (auto& peer : peers_) {
    if (!peer->control) continue;
    peer->control->send_goodbye(why);
    peer->control->stop();
  }
  // The peers' data connections end here, behind the last byte, and not when the last reference to the group goes.
  for (auto& peer : peers_) {
    peer->channel.store(nullptr, std::memory_order_release);
    peer->owned.reset();
    std::shared_ptr<ControlLink> control;  // let go of without the lock: it may be the reactor's last user
    std::lock_guard lock(mutex_);
    control.swap(peer->control);
  }
  // Descriptors too: who looks at the timeline of a closed group may keep it for long.
  release_staging();
  doorbell_->close_fd();
}

}  // namespace bagua

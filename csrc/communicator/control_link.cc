// Frames of the control link; see control_link.h.
#include "csrc/communicator/control_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/common/shared_segments.h"

namespace bagua {
namespace {

struct SegmentNote {
  uint64_t id;
  uint64_t bytes;
};

struct LossNote {
  int32_t rank;
  uint32_t is_there;
};
// So that a frame, with the longest cause, stays far below what a link takes.
constexpr uint32_t kMaxLosses = 4096;

// Nothing when it is none.
std::optional<Error> error_from(const uint8_t* payload, size_t bytes) {
  if (bytes < 12) return std::nullopt;
  uint32_t kind, operation_bytes;
  int32_t rank;
  std::memcpy(&kind, payload, 4);
  std::memcpy(&rank, payload + 4, 4);
  std::memcpy(&operation_bytes, payload + 8, 4);
  if (operation_bytes > bytes - 12 || kind > static_cast<uint32_t>(ErrorKind::kDevice)) return std::nullopt;
  const std::string operation(reinterpret_cast<const char*>(payload + 12), operation_bytes);
  const std::string what(reinterpret_cast<const char*>(payload + 12 + operation_bytes), bytes - 12 - operation_bytes);
  return Error(static_cast<ErrorKind>(kind), what, rank, operation);
}

struct Abort {
  Error cause;
  Losses losses;
};

// Nothing when it is none. Whoever knows the group's size drops ranks that it does not have.
std::optional<Abort> abort_from(const uint8_t* payload, size_t bytes) {
  uint32_t count;
  if (bytes < sizeof count) return std::nullopt;
  std::memcpy(&count, payload, sizeof count);
  if (count > kMaxLosses || count > (bytes - sizeof count) / sizeof(LossNote)) return std::nullopt;
  Losses losses;
  for (uint32_t i = 0; i < count; ++i) {
    LossNote note;
    std::memcpy(&note, payload + sizeof count + i * sizeof note, sizeof note);
    losses.lost.insert(note.rank);
    if (note.is_there != 0) losses.there.insert(note.rank);
  }
  const size_t before = sizeof count + count * sizeof(LossNote);
  auto cause = error_from(payload + before, bytes - before);
  if (!cause) return std::nullopt;
  return Abort{std::move(*cause), std::move(losses)};
}

}  // namespace

// The payload of a frame has: kind, rank, the bytes of the operation's name, which follows, and the message.
std::vector<uint8_t> error_bytes(const Error& error) {
  const std::string what = std::string(error.what()).substr(0, 8192);
  const std::string operation = error.operation().substr(0, 256);
  const uint32_t numbers[3] = {static_cast<uint32_t>(error.kind()), static_cast<uint32_t>(error.rank()),
                               static_cast<uint32_t>(operation.size())};
  std::vector<uint8_t> payload(sizeof numbers + operation.size() + what.size());
  std::memcpy(payload.data(), numbers, sizeof numbers);
  std::copy(operation.begin(), operation.end(), payload.begin() + sizeof numbers);
  std::copy(what.begin(), what.end(), payload.end() - static_cast<long>(what.size()));
  return payload;
}

// The payload of a frame has: how many are lost, each with whether it is there, and the cause.
std::vector<uint8_t> abort_bytes(const Error& cause, const Losses& losses) {
  std::vector<LossNote> notes;
  for (const int rank : losses.lost) {
    if (notes.size() == kMaxLosses) break;
    notes.push_back({rank, losses.there.count(rank) != 0});
  }
  const auto count = static_cast<uint32_t>(notes.size());
  const auto error = error_bytes(cause);
  std::vector<uint8_t> payload(sizeof count + notes.size() * sizeof(LossNote) + error.size());
  std::memcpy(payload.data(), &count, sizeof count);
  if (count > 0) std::memcpy(payload.data() + sizeof count, notes.data(), notes.size() * sizeof(LossNote));
  std::copy(error.begin(), error.end(), payload.end() - static_cast<long>(error.size()));
  return payload;
}

ControlLink::ControlLink(std::shared_ptr<ProcessLink> link, std::string group, int peer)
    : link_(std::move(link)), group_(std::move(group)), peer_(peer) {}

ControlLink::~ControlLink() {
  stop();
  for (auto& [id, mapping] : mapped_) unmap_shared(mapping.data, mapping.bytes);
  unmap_released();
}

void ControlLink::start(Events events) {
  events_ = std::move(events);
  subscription_ = SegmentRegistry::instance().subscribe([this](uint64_t id) {
    {
      std::lock_guard lock(segment_mutex_);
      if (handed_out_.erase(id) == 0) return;
    }
    send_frame(FrameType::kReleased, &id, sizeof id);
  });
  is_routed_ = true;
  link_->add_route(group_, this);
}

void ControlLink::stop() {
  if (std::exchange(is_routed_, false)) link_->remove_route(group_);
  if (subscription_ != 0) SegmentRegistry::instance().unsubscribe(subscription_);
  subscription_ = 0;
}

void ControlLink::send_abort(const Error& cause, const Losses& losses) {
  const auto payload = abort_bytes(cause, losses);
  send_frame(FrameType::kAbort, payload.data(), payload.size());
}

void ControlLink::send_leave(const std::optional<Error>& why) {
  const auto payload = why ? error_bytes(*why) : std::vector<uint8_t>{};
  send_frame(FrameType::kLeave, payload.data(), payload.size());
}

void ControlLink::request_status(const StatusRequest& request) {
  send_frame(FrameType::kStatusRequest, &request, sizeof request);
}

void ControlLink::send_frame(FrameType type, const void* payload, size_t bytes, Descriptor pass) {
  link_->send(type, group_, payload, bytes, std::move(pass));
}

void ControlLink::on_end(const std::string& how, bool said_goodbye) {
  if (has_left_) return;
  if (said_goodbye || had_left_before_) {
    events_.on_leave({});
  } else {
    events_.on_lost(how);
  }
}

void ControlLink::on_silence(const ProcessLink::Silence& silence) {
  if (!has_left_) events_.on_silence(silence);
}

void ControlLink::on_lost_descriptor() {
  events_.on_failure(
      Error(ErrorKind::kTransport, "this rank has no file descriptor left for the shared memory of rank " +
                                       std::to_string(peer_) + "; raise `ulimit -n`"));
}

void ControlLink::on_frame(FrameType type, const uint8_t* payload, size_t bytes, Descriptor passed) {
  uint64_t id = 0;
  switch (type) {
    case FrameType::kAbort:
      if (const auto abort = abort_from(payload, bytes)) events_.on_abort(abort->cause, abort->losses);
      break;
    case FrameType::kLeave:
      has_left_ = true;
      events_.on_leave(error_from(payload, bytes));
      break;
    case FrameType::kStatusRequest: {
      StatusRequest request;
      if (bytes != sizeof request) break;
      std::memcpy(&request, payload, sizeof request);
      const PeerStatus status = events_.my_status(request);
      send_frame(FrameType::kStatus, &status, sizeof status);
      break;
    }
    case FrameType::kStatus: {
      PeerStatus status;
      if (bytes != sizeof status) break;
      std::memcpy(&status, payload, sizeof status);
      had_left_before_ = status.group == PeerStatus::kHasLeft;
      events_.on_status(status);
      break;
    }
    case FrameType::kSegmentRequest:
      if (bytes != sizeof id) break;
      std::memcpy(&id, payload, sizeof id);
      send_segment(id);
      break;
    case FrameType::kSegment: receive_segment(payload, bytes, std::move(passed)); break;
    case FrameType::kReleased: {
      if (bytes != sizeof id) break;
      std::memcpy(&id, payload, sizeof id);
      {
        std::lock_guard lock(segment_mutex_);
        const auto found = mapped_.find(id);
        if (found == mapped_.end()) break;
        released_.push_back(found->second);
        mapped_.erase(found);
      }
      events_.on_released();
      break;
    }
    default: break;  // a newer version may know more; versions are compared at start
  }
}

void ControlLink::send_segment(uint64_t id) {
  {
    std::lock_guard lock(segment_mutex_);
    handed_out_.insert(id);  // before the duplicate: whoever releases the segment from now on tells the peer
  }
  auto handle = SegmentRegistry::instance().duplicate(id);
  if (!handle) {  // released while the request was under way: no rank can still need it
    std::lock_guard lock(segment_mutex_);
    handed_out_.erase(id);
    return;
  }
  if (handle->fd.get() < 0) {
    events_.on_failure(Error(ErrorKind::kTransport, "this rank has no file descriptor left to share memory with rank " +
                                                        std::to_string(peer_) + "; raise `ulimit -n`"));
    return;
  }
  const SegmentNote note{id, handle->bytes};
  send_frame(FrameType::kSegment, &note, sizeof note, std::move(handle->fd));
}

void ControlLink::receive_segment(const uint8_t* payload, size_t bytes, Descriptor fd) {
  SegmentNote note;
  if (bytes != sizeof note || fd.get() < 0) return;
  std::memcpy(&note, payload, sizeof note);
  {
    std::lock_guard lock(segment_mutex_);
    if (requested_.count(note.id) == 0) return;  // no rank has asked for it
  }
  try {
    expect_sealed(fd.get(), note.bytes);
  } catch (const Error& error) {
    events_.on_failure(Error(error.kind(), error.what(), peer_));
    return;
  }
  try {
    void* data = map_shared(fd.get(), note.bytes);
    std::lock_guard lock(segment_mutex_);
    mapped_[note.id] = {data, note.bytes};
    requested_.erase(note.id);
  } catch (const Error& error) {
    events_.on_failure(error);
  }
  events_.on_segment();
}

void* ControlLink::map(const Address& address, size_t bytes) {
  const uint64_t id = address.segment;
  {
    std::lock_guard lock(segment_mutex_);
    const auto found = mapped_.find(id);
    if (found != mapped_.end()) {
      if (address.offset > found->second.bytes || bytes > found->second.bytes - address.offset) {
        throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer_) + " named shared memory outside its segment",
                    peer_);
      }
      return static_cast<uint8_t*>(found->second.data) + address.offset;
    }
    if (!requested_.insert(id).second) return nullptr;
  }
  send_frame(FrameType::kSegmentRequest, &id, sizeof id);
  return nullptr;
}

void ControlLink::unmap_released() {
  std::vector<Mapping> released;
  {
    std::lock_guard lock(segment_mutex_);
    released.swap(released_);
  }
  for (const Mapping& mapping : released) unmap_shared(mapping.data, mapping.bytes);
}

}  // namespace bagua

// Frames of the control link; see control_link.h.
#include "csrc/communicator/control_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "csrc/common/shared_segments.h"

namespace bagua {
namespace {

enum FrameType : uint32_t { kAbort = 1, kLeave, kStatusRequest, kStatus, kSegmentRequest, kSegment, kReleased };

struct FrameHeader {
  uint32_t type;
  uint32_t bytes;
};

// Frames are small; a longer one is garbage, and believing its length would be a way to exhaust memory.
constexpr uint32_t kMaxFrameBytes = 1 << 16;

struct SegmentNote {
  uint64_t id;
  uint64_t bytes;
};

// An error as the payload of a frame: kind, rank, the bytes of the operation's name, which follows, and the message.
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

// Nothing when it is none.
std::optional<Error> error_from(const uint8_t* payload, size_t bytes) {
  if (bytes < 12) return std::nullopt;
  uint32_t kind, operation_bytes;
  int32_t rank;
  std::memcpy(&kind, payload, 4);
  std::memcpy(&rank, payload + 4, 4);
  std::memcpy(&operation_bytes, payload + 8, 4);
  if (operation_bytes > bytes - 12) return std::nullopt;
  const std::string operation(reinterpret_cast<const char*>(payload + 12), operation_bytes);
  const std::string what(reinterpret_cast<const char*>(payload + 12 + operation_bytes), bytes - 12 - operation_bytes);
  return Error(static_cast<ErrorKind>(kind), what, rank, operation);
}

}  // namespace

ControlLink::ControlLink(int fd, int peer) : fd_(fd), peer_(peer), reactor_(Reactor::instance()) {}

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
    send_frame(kReleased, &id, sizeof id);
  });
  reactor_id_ = reactor_->add(fd_.get(), this);
}

void ControlLink::stop() {
  if (reactor_id_ != 0) reactor_->remove(reactor_id_);
  if (subscription_ != 0) SegmentRegistry::instance().unsubscribe(subscription_);
  reactor_id_ = subscription_ = 0;
}

void ControlLink::send_abort(const Error& cause) {
  const auto payload = error_bytes(cause);
  send_frame(kAbort, payload.data(), payload.size());
}

void ControlLink::send_leave(const std::optional<Error>& why) {
  const auto payload = why ? error_bytes(*why) : std::vector<uint8_t>{};
  send_frame(kLeave, payload.data(), payload.size());
}

void ControlLink::request_status(const StatusRequest& request) { send_frame(kStatusRequest, &request, sizeof request); }

bool ControlLink::reaches_host() {
  std::lock_guard lock(send_mutex_);
  int unacknowledged = 0;  // of a Unix socket: not read yet, which says nothing of its host, this one
  int domain = AF_UNIX;
  socklen_t length = sizeof domain;
  getsockopt(fd_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &length);
  if (domain == AF_UNIX) return true;
  return output_.empty() && ioctl(fd_.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged == 0;
}

void ControlLink::send_frame(uint32_t type, const void* payload, size_t bytes, Descriptor pass) {
  Output out;
  out.pass = std::move(pass);
  const FrameHeader header{type, static_cast<uint32_t>(bytes)};
  out.bytes.resize(sizeof header + bytes);
  std::memcpy(out.bytes.data(), &header, sizeof header);
  if (bytes != 0) std::memcpy(out.bytes.data() + sizeof header, payload, bytes);
  std::lock_guard lock(send_mutex_);
  output_.push_back(std::move(out));
  flush_locked();
}

// True when everything has been written. What is left goes out when the reactor reports the socket writable.
bool ControlLink::flush_locked() {
  while (!output_.empty()) {
    Output& out = output_.front();
    iovec part{out.bytes.data() + out.sent, out.bytes.size() - out.sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> ancillary{};
    if (const int pass = out.pass.get(); pass >= 0) {
      message.msg_control = ancillary.data();
      message.msg_controllen = ancillary.size();
      cmsghdr* control = CMSG_FIRSTHDR(&message);
      control->cmsg_level = SOL_SOCKET;
      control->cmsg_type = SCM_RIGHTS;
      control->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(control), &pass, sizeof(int));
    }
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (sent < 0) {  // the peer has exited; the reading side reports it
      output_.clear();
      return true;
    }
    out.pass.reset();  // it left with the first byte
    out.sent += static_cast<size_t>(sent);
    if (out.sent == out.bytes.size()) output_.pop_front();
  }
  return true;
}

void ControlLink::on_ready() {
  {
    std::lock_guard lock(send_mutex_);
    flush_locked();
  }
  if (lost_) return;
  while (receive_more()) {
    size_t used = 0;
    while (input_.size() - used >= sizeof(FrameHeader)) {
      FrameHeader header;
      std::memcpy(&header, input_.data() + used, sizeof header);
      if (header.bytes > kMaxFrameBytes) {
        lost_ = true;
        events_.on_lost("sent a control frame of " + std::to_string(header.bytes) + " bytes");
        return;
      }
      if (input_.size() - used < sizeof header + header.bytes) break;
      handle(header.type, input_.data() + used + sizeof header, header.bytes);
      used += sizeof header + header.bytes;
    }
    input_.erase(input_.begin(), input_.begin() + static_cast<long>(used));
  }
}

// False when there is nothing to read now, or ever again.
bool ControlLink::receive_more() {
  std::array<uint8_t, 4096> buffer;
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> ancillary;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = ancillary.data();
  message.msg_controllen = ancillary.size();
  ssize_t got;
  do {
    got = recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  if (got <= 0) {
    lost_ = true;
    if (!has_left_) events_.on_lost(got == 0 ? "closed its connection" : std::strerror(errno));
    return false;
  }
  take_descriptors(message);
  input_.insert(input_.end(), buffer.begin(), buffer.begin() + got);
  return true;
}

void ControlLink::take_descriptors(msghdr& message) {
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof fd);
      input_fds_.emplace_back(fd);
    }
  }
  if (message.msg_flags & MSG_CTRUNC) {
    events_.on_failure(
        Error(ErrorKind::kTransport, "this rank has no file descriptor left for the shared memory of rank " +
                                         std::to_string(peer_) + "; raise `ulimit -n`"));
  }
}

void ControlLink::handle(uint32_t type, const uint8_t* payload, size_t bytes) {
  uint64_t id = 0;
  switch (type) {
    case kAbort:
      if (const auto cause = error_from(payload, bytes)) events_.on_abort(*cause);
      break;
    case kLeave:
      has_left_ = true;
      events_.on_leave(error_from(payload, bytes));
      break;
    case kStatusRequest: {
      StatusRequest request;
      if (bytes != sizeof request) break;
      std::memcpy(&request, payload, sizeof request);
      const PeerStatus status = events_.my_status(request);
      send_frame(kStatus, &status, sizeof status);
      break;
    }
    case kStatus: {
      PeerStatus status;
      if (bytes != sizeof status) break;
      std::memcpy(&status, payload, sizeof status);
      events_.on_status(status);
      break;
    }
    case kSegmentRequest:
      if (bytes != sizeof id) break;
      std::memcpy(&id, payload, sizeof id);
      send_segment(id);
      break;
    case kSegment: receive_segment(payload, bytes); break;
    case kReleased: {
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
  if (!handle) {  // released while the request was under way: nobody can still need it
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
  send_frame(kSegment, &note, sizeof note, std::move(handle->fd));
}

void ControlLink::receive_segment(const uint8_t* payload, size_t bytes) {
  SegmentNote note;
  if (bytes != sizeof note || input_fds_.empty()) return;
  std::memcpy(&note, payload, sizeof note);
  const Descriptor fd = std::move(input_fds_.front());
  input_fds_.pop_front();
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
      if (address.offset + bytes > found->second.bytes) {
        throw Error(ErrorKind::kInternal, "rank " + std::to_string(peer_) + " named shared memory outside its segment",
                    peer_);
      }
      return static_cast<uint8_t*>(found->second.data) + address.offset;
    }
    if (!requested_.insert(id).second) return nullptr;
  }
  send_frame(kSegmentRequest, &id, sizeof id);
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

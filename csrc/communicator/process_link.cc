// Frames of all groups on one connection, and its heartbeats; see process_link.h.
#include "csrc/communicator/process_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/uio.h>

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

struct FrameHeader {
  uint32_t type;
  uint32_t bytes;
};

// Frames are small; a longer one is garbage, and believing its length would be a way to exhaust memory.
constexpr uint32_t kMaxFrameBytes = 1 << 16;
constexpr size_t kMaxPassed = 1024;
// How often the other process is asked about the same rank.
constexpr milliseconds kInquiryInterval{50};

}  // namespace

// Doubt begins early enough that what others hear can be asked within the timeout, and is not old by then.
ProcessLink::Pace::Pace(milliseconds timeout)
    : timeout(timeout),
      silence(timeout - std::min(timeout / 5, milliseconds(1500))),
      heartbeat(std::max(timeout / 10, milliseconds(10))),
      tick(std::clamp(timeout / 50, milliseconds(5), milliseconds(200))) {}

ProcessLink::ProcessLink(Descriptor fd, const Pace& pace, Unrouted unrouted, Hears hears)
    : fd_(std::move(fd)),
      pace_(pace),
      unrouted_(std::move(unrouted)),
      hears_(std::move(hears)),
      reactor_(Reactor::instance()) {
  ticked_at_ = sent_at_ = reached_host_at_ = Clock::now();
  heard_at_.store(ticked_at_.time_since_epoch().count(), std::memory_order_relaxed);
}

ProcessLink::~ProcessLink() { stop(); }

void ProcessLink::start() { reactor_id_ = reactor_->add(fd_.get(), this, pace_.tick); }

void ProcessLink::stop() {
  if (reactor_id_ != 0) reactor_->remove(std::exchange(reactor_id_, 0));
  has_ended_.store(true, std::memory_order_release);
  shutdown(fd_.get(), SHUT_RDWR);
}

void ProcessLink::add_route(const std::string& group, Route* route) {
  std::lock_guard lock(routes_mutex_);
  routes_[group] = route;
  if (has_ended()) route->on_end(how_ended_, said_goodbye_);
}

void ProcessLink::remove_route(const std::string& group) {
  std::lock_guard lock(routes_mutex_);
  routes_.erase(group);
}

bool ProcessLink::reaches_host() {
  int unacknowledged = 0;  // of a Unix socket: not read yet, which says nothing of its host, this one
  int domain = AF_UNIX;
  socklen_t length = sizeof domain;
  getsockopt(fd_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &length);
  if (domain == AF_UNIX) return true;
  std::lock_guard lock(send_mutex_);
  return output_.empty() && ioctl(fd_.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged == 0;
}

nanoseconds ProcessLink::silent_for() const {
  const Clock::time_point heard_at(Clock::duration(heard_at_.load(std::memory_order_relaxed)));
  return Clock::now() - heard_at;
}

// ---- sending

void ProcessLink::send(FrameType type, std::string_view group, const void* payload, size_t bytes, Descriptor pass) {
  const auto group_bytes = static_cast<uint16_t>(group.size());
  const FrameHeader header{static_cast<uint32_t>(type),
                           static_cast<uint32_t>(sizeof group_bytes + group.size() + bytes)};
  Output out;
  out.pass = std::move(pass);
  out.bytes.resize(sizeof header + header.bytes);
  uint8_t* at = out.bytes.data();
  const auto append = [&at](const void* from, size_t count) {
    if (count != 0) std::memcpy(at, from, count);
    at += count;
  };
  append(&header, sizeof header);
  append(&group_bytes, sizeof group_bytes);
  append(group.data(), group.size());
  append(payload, bytes);
  std::lock_guard lock(send_mutex_);
  sent_at_ = Clock::now();
  if (type == FrameType::kStatusRequest || type == FrameType::kInquiry) {
    Clock::rep none = 0;
    unanswered_since_.compare_exchange_strong(none, sent_at_.time_since_epoch().count(), std::memory_order_relaxed);
  }
  output_.push_back(std::move(out));
  flush_locked();
}

// True when everything has been written. What is left goes out when the reactor reports the socket writable.
bool ProcessLink::flush_locked() {
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

// ---- what the other process is asked about third ones

void ProcessLink::inquire(int about) {
  {
    std::lock_guard lock(inquiries_mutex_);
    const auto now = Clock::now();
    Asked& asked = asked_[about];
    if (now - asked.last < kInquiryInterval) return;
    asked.last = now;
  }
  const Inquiry inquiry{about};
  send(FrameType::kInquiry, {}, &inquiry, sizeof inquiry);
}

std::optional<Hearing> ProcessLink::testimony(int about, Clock::time_point since) const {
  std::lock_guard lock(inquiries_mutex_);
  const auto found = asked_.find(about);
  if (found == asked_.end() || !found->second.answered_at || *found->second.answered_at < since) return std::nullopt;
  return found->second.hearing;
}

bool ProcessLink::has_answered_since(Clock::time_point since) const {
  std::lock_guard lock(inquiries_mutex_);
  return answered_at_ && *answered_at_ >= since;
}

nanoseconds ProcessLink::unanswered_for() const {
  const auto since = unanswered_since_.load(std::memory_order_relaxed);
  return since == 0 ? nanoseconds(0) : Clock::now() - Clock::time_point(Clock::duration(since));
}

// ---- what follows runs on the reactor thread

void ProcessLink::on_ready() {
  {
    std::lock_guard lock(send_mutex_);
    flush_locked();
  }
  while (!has_ended() && receive_more()) take_frames();
}

// A process that did not run for a while, and so sent nothing either, has not listened meanwhile.
void ProcessLink::on_tick() {
  if (has_ended()) return;
  const auto now = Clock::now();
  const auto late = now - ticked_at_ - pace_.tick;
  ticked_at_ = now;
  if (late > pace_.heartbeat) {
    on_ready();
    const auto heard_at = heard_at_.load(std::memory_order_relaxed) + Clock::duration(late).count();
    heard_at_.store(std::min(heard_at, now.time_since_epoch().count()), std::memory_order_relaxed);
    if (unanswered_since_.load(std::memory_order_relaxed) != 0) {
      unanswered_since_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    }
    reached_host_at_ = std::min(reached_host_at_ + late, now);
  }
  if (reaches_host()) reached_host_at_ = now;  // before something is sent, which no rank has acknowledged yet
  bool is_due;
  {
    std::lock_guard lock(send_mutex_);
    is_due = output_.empty() && now - sent_at_ >= pace_.heartbeat;
  }
  if (is_due) send(FrameType::kHeartbeat, {}, nullptr, 0);
  // An acknowledgement may be delayed, but not for long.
  const auto lasts = silent_for();
  const Silence silence{lasts, now - reached_host_at_ < lasts / 2, lasts + pace_.tick >= pace_.timeout};
  if (silence.lasts < pace_.silence || !has_heard_ || has_ended()) return;
  std::lock_guard lock(routes_mutex_);
  const auto routes = routes_;  // one may remove itself
  for (const auto& [group, route] : routes) {
    if (routes_.count(group) != 0) route->on_silence(silence);
  }
}

// False when there is nothing to read now, or ever again.
bool ProcessLink::receive_more() {
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
    // A process that dies with bytes of ours unread resets the connection.
    const bool is_closed = got == 0 || errno == ECONNRESET;
    end(said_goodbye_ ? "shut down"
        : is_closed   ? "closed its connection"
                      : "lost its connection (" + std::string(std::strerror(errno)) + ")");
    return false;
  }
  heard_at_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  unanswered_since_.store(0, std::memory_order_relaxed);
  has_heard_ = true;
  take_descriptors(message);
  input_.insert(input_.end(), buffer.begin(), buffer.begin() + got);
  return true;
}

void ProcessLink::take_descriptors(msghdr& message) {
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof fd);
      input_fds_.emplace_back(fd);
    }
  }
  if (input_fds_.size() > kMaxPassed) end("passed descriptors without saying what for");
  if (message.msg_flags & MSG_CTRUNC) {
    std::lock_guard lock(routes_mutex_);
    const auto routes = routes_;
    for (const auto& [group, route] : routes) route->on_lost_descriptor();
  }
}

void ProcessLink::take_frames() {
  size_t used = 0;
  while (!has_ended() && input_.size() - used >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, input_.data() + used, sizeof header);
    if (header.bytes > kMaxFrameBytes) {
      end("sent a control frame of " + std::to_string(header.bytes) + " bytes");
      return;
    }
    if (input_.size() - used < sizeof header + header.bytes) break;
    handle(static_cast<FrameType>(header.type), input_.data() + used + sizeof header, header.bytes);
    used += sizeof header + header.bytes;
  }
  input_.erase(input_.begin(), input_.begin() + static_cast<long>(used));
}

void ProcessLink::handle(FrameType type, const uint8_t* body, size_t bytes) {
  uint16_t group_bytes;
  if (bytes < sizeof group_bytes) return end("sent a control frame without a group");
  std::memcpy(&group_bytes, body, sizeof group_bytes);
  if (group_bytes > bytes - sizeof group_bytes) return end("sent a control frame without its group");
  const std::string group(reinterpret_cast<const char*>(body + sizeof group_bytes), group_bytes);
  Descriptor passed;
  if (type == FrameType::kSegment && !input_fds_.empty()) {
    passed = std::move(input_fds_.front());
    input_fds_.pop_front();
  }
  std::lock_guard lock(routes_mutex_);
  const size_t before = sizeof group_bytes + group_bytes;
  if (group.empty()) return handle_own(type, body + before, bytes - before);
  const auto found = routes_.find(group);
  if (found != routes_.end()) {
    found->second->on_frame(type, body + before, bytes - before, std::move(passed));
  } else if (unrouted_) {
    unrouted_(*this, type, group, body + before, bytes - before);
  }
}

void ProcessLink::handle_own(FrameType type, const uint8_t* payload, size_t bytes) {
  if (type == FrameType::kGoodbye) said_goodbye_ = true;
  if (type == FrameType::kInquiry && bytes == sizeof(Inquiry)) {
    Inquiry inquiry;
    std::memcpy(&inquiry, payload, sizeof inquiry);
    const Testimony testimony{inquiry.about, hears_ ? hears_(inquiry.about) : Hearing::kCannotTell};
    send(FrameType::kTestimony, {}, &testimony, sizeof testimony);
  }
  if (type == FrameType::kTestimony && bytes == sizeof(Testimony)) {
    Testimony testimony;
    std::memcpy(&testimony, payload, sizeof testimony);
    std::lock_guard lock(inquiries_mutex_);
    const auto found = asked_.find(testimony.about);
    if (found == asked_.end()) return;  // no rank has asked
    found->second.hearing = testimony.hearing;
    answered_at_ = found->second.answered_at = Clock::now();
  }
}

void ProcessLink::end(const std::string& how) {
  std::lock_guard lock(routes_mutex_);
  how_ended_ = how;
  has_ended_.store(true, std::memory_order_release);
  const auto routes = routes_;
  for (const auto& [group, route] : routes) {
    if (routes_.count(group) != 0) route->on_end(how, said_goodbye_);
  }
  shutdown(fd_.get(), SHUT_RDWR);  // where it ends for what the peer sent, so that the peer hears it
}

}  // namespace bagua

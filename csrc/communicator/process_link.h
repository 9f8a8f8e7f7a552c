// ProcessLink: the connection between this process and one other of the job, for all groups of both. It carries the
// groups' control frames (control_link.h) and heartbeats: while the other process lives, something arrives, however
// long its program computes, since the reactor thread sends and never takes the GIL. Its end without a goodbye is how
// the death of a process is noticed, at once; its silence is how that of a host is. Whether the other process hears
// from a third one, it asks for all groups at once.
//
// Reads happen on the reactor thread, writes on any thread. Frames: u32 type, u32 bytes of what follows: u16 bytes of
// the group's key, the key, payload.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/socket.h>

#include "csrc/common/fork_guard.h"
#include "csrc/common/reactor.h"
#include "csrc/communicator/peer_status.h"

namespace bagua {

enum class FrameType : uint32_t {
  kAbort = 1,
  kLeave,
  kStatusRequest,
  kStatus,
  kSegmentRequest,
  kSegment,  // passes a descriptor
  kReleased,
  // Frames of the link itself:
  kHeartbeat,
  kGoodbye,
  kInquiry,
  kTestimony,
};

class ProcessLink : public Reactor::Handler {
 public:
  using Clock = std::chrono::steady_clock;

  // Nothing has arrived for longer than a peer that lives may be silent.
  struct Silence {
    std::chrono::nanoseconds lasts;
    bool reaches_host;  // see reaches_host(); of what was sent a heartbeat ago, and so has had time to arrive
    bool is_over;       // the timeout ends before the next look
  };

  // One group's end of the link. Called on the reactor thread, and not any more once remove_route has returned.
  class Route {
   public:
    virtual ~Route() = default;
    // `passed` is empty unless the frame passes a descriptor.
    virtual void on_frame(FrameType type, const uint8_t* payload, size_t bytes, Descriptor passed) = 0;
    // The link has ended; the last call.
    virtual void on_end(const std::string& how, bool said_goodbye) = 0;
    // At every tick while the peer is silent.
    virtual void on_silence(const Silence& silence) = 0;
    // No descriptor is left for one that was passed.
    virtual void on_lost_descriptor() = 0;
  };
  // A frame of a group that has no route here.
  using Unrouted = std::function<void(ProcessLink& link, FrameType type, const std::string& group,
                                      const uint8_t* payload, size_t bytes)>;
  // Whether this process hears from a rank of the job, which the other one asks; none of the link's routes is asked.
  using Hears = std::function<Hearing(int job_rank)>;

  // How long a peer may be silent until it is named, and until it is doubted, how often this end sends at least, and
  // how often it looks.
  struct Pace {
    explicit Pace(std::chrono::milliseconds timeout);
    std::chrono::milliseconds timeout, silence, heartbeat, tick;
  };

  // `fd`: a connected stream socket.
  ProcessLink(Descriptor fd, const Pace& pace, Unrouted unrouted = {}, Hears hears = {});
  ~ProcessLink() override;

  // Begins to read; routes that were added before miss nothing.
  void start();
  // Tells the peer that this process leaves the job, so that the end of the link is no death.
  void say_goodbye() { send(FrameType::kGoodbye, {}, nullptr, 0); }
  // Ends this side; no route is called any more. Idempotent.
  void stop();
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

  // One route for each group. Without locks that a route takes; the route's on_end may be called here.
  void add_route(const std::string& group, Route* route);
  void remove_route(const std::string& group);

  // [any thread]
  void send(FrameType type, std::string_view group, const void* payload, size_t bytes, Descriptor pass = {});
  // Whether all that was sent has reached the peer's host: one whose process is stopped still acknowledges, a host that
  // is down or behind a cut cable does not.
  bool reaches_host();
  // The time for which nothing has arrived, as far as this process was running.
  std::chrono::nanoseconds silent_for() const;
  const Pace& pace() const { return pace_; }

  // Asks the other process whether it hears from a rank of the job, -1: only whether it answers. However many groups
  // want to know, and however often, it is asked once in a while. [any thread]
  void inquire(int about);
  // Returns its answer since then about that rank, if there is one. [any thread]
  std::optional<Hearing> testimony(int about, Clock::time_point since) const;
  // Whether it has answered anything since then. [any thread]
  bool has_answered_since(Clock::time_point since) const;
  // The time for which nothing has come since something was asked, by whatever group. [any thread]
  std::chrono::nanoseconds unanswered_for() const;

  void on_ready() override;
  void on_tick() override;

 private:
  bool flush_locked();
  bool receive_more();
  void take_descriptors(msghdr& message);
  void take_frames();
  void handle(FrameType type, const uint8_t* body, size_t bytes);
  void handle_own(FrameType type, const uint8_t* payload, size_t bytes);
  void end(const std::string& how);

  const Descriptor fd_;
  const Pace pace_;
  const Unrouted unrouted_;
  const Hears hears_;
  std::shared_ptr<Reactor> reactor_;
  uint64_t reactor_id_ = 0;
  std::atomic<bool> has_ended_{false};
  std::atomic<Clock::rep> heard_at_;             // of the reactor thread, read by any
  std::atomic<Clock::rep> unanswered_since_{0};  // 0: something has come since
  bool has_heard_ = false;                       // reactor thread; before, the peer may not have its end yet
  Clock::time_point reached_host_at_;            // reactor thread, as the next three
  Clock::time_point ticked_at_;
  std::vector<uint8_t> input_;
  std::deque<Descriptor> input_fds_;

  // Guards what follows, and the running of routes; recursive: a route may remove itself. Taken before any lock that a
  // route takes, and after the reactor's.
  std::recursive_mutex routes_mutex_;
  std::map<std::string, Route*> routes_;
  std::string how_ended_;
  bool said_goodbye_ = false;  // the peer

  std::mutex send_mutex_;  // guards what follows, and writing to fd_
  struct Output {
    std::vector<uint8_t> bytes;
    size_t sent = 0;
    Descriptor pass;
  };
  std::deque<Output> output_;
  Clock::time_point sent_at_;

  mutable std::mutex inquiries_mutex_;  // guards what follows; no other lock is taken under it
  struct Asked {
    Clock::time_point last;
    Hearing hearing = Hearing::kCannotTell;
    std::optional<Clock::time_point> answered_at;
  };
  std::map<int, Asked> asked_;  // by what it was asked about
  std::optional<Clock::time_point> answered_at_;
};

}  // namespace bagua

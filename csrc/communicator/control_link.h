// ControlLink: the small-message connection to one peer of a group, beside its data channel. It carries
// the first cause of a failure, requests for the peer's status, the notice that a peer leaves, and descriptors of
// shared segments; its end without that notice is how the death of a peer is noticed, at once.
//
// Reads happen on the reactor thread, writes on any thread. Frames: u32 type, u32 payload bytes, payload.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <sys/socket.h>

#include "csrc/common/error.h"
#include "csrc/common/fork_guard.h"
#include "csrc/common/reactor.h"
#include "csrc/communicator/peer_status.h"
#include "csrc/transport/transport.h"

namespace bagua {

class ControlLink : public Reactor::Handler, public PeerMemory {
 public:
  // What the link tells its owner; called on the reactor thread.
  struct Events {
    std::function<void(const Error&)> on_abort;           // the peer reports a first cause
    std::function<void(const std::string& how)> on_lost;  // ended, and the peer had not left
    std::function<void(const Error&)> on_failure;         // this rank can't go on
    // Why the peer leaves, if it does so because of a failure in another group of its process.
    std::function<void(const std::optional<Error>& why)> on_leave;
    std::function<void(const PeerStatus&)> on_status;
    std::function<PeerStatus(const StatusRequest&)> my_status;
    std::function<void()> on_segment;   // a mapping arrived
    std::function<void()> on_released;  // the peer freed a segment: unmap_released() when nobody reads it
  };

  // Takes ownership of the connected stream socket `fd`.
  ControlLink(int fd, int peer);
  ~ControlLink() override;

  void start(Events events);
  void stop();  // after it no event is called

  void send_abort(const Error& cause);
  void send_leave(const std::optional<Error>& why = {});
  void request_status(const StatusRequest& request);
  // Whether all that was sent has reached the peer's host: one whose process is stopped still acknowledges, a host that
  // is down or behind a cut cable does not. [any thread]
  bool reaches_host();

  // Sends a request for the segment when it is not mapped.
  void* map(const Address& address, size_t bytes) override;
  // Unmaps what the peer has released. Only between operations of the group's worker.
  void unmap_released();

  void on_ready() override;

 private:
  struct Mapping {
    void* data = nullptr;
    uint64_t bytes = 0;
  };
  void send_frame(uint32_t type, const void* payload, size_t bytes, Descriptor pass = {});
  bool flush_locked();
  bool receive_more();
  void take_descriptors(msghdr& message);
  void handle(uint32_t type, const uint8_t* payload, size_t bytes);
  void send_segment(uint64_t id);
  void receive_segment(const uint8_t* payload, size_t bytes);

  const Descriptor fd_;
  const int peer_;
  Events events_;
  std::shared_ptr<Reactor> reactor_;
  uint64_t reactor_id_ = 0;
  uint64_t subscription_ = 0;
  bool has_left_ = false;  // reactor thread
  bool lost_ = false;      // reactor thread
  std::vector<uint8_t> input_;
  std::deque<Descriptor> input_fds_;

  std::mutex send_mutex_;  // guards output_ and writing to fd_
  struct Output {
    std::vector<uint8_t> bytes;
    size_t sent = 0;
    Descriptor pass;
  };
  std::deque<Output> output_;

  std::mutex segment_mutex_;  // guards the four below
  std::map<uint64_t, Mapping> mapped_;
  std::set<uint64_t> requested_;
  std::set<uint64_t> handed_out_;
  std::vector<Mapping> released_;
};

}  // namespace bagua

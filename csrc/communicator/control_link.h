// ControlLink: one group's part of the link to a peer's process, beside the group's data channel. It carries the first
// cause of a failure, requests for the peer's status, the notice that a peer leaves, and descriptors of shared
// segments.
//
// Events are called on the reactor thread; everything is sent on any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/common/fork_guard.h"
#include "csrc/communicator/blame.h"
#include "csrc/communicator/peer_status.h"
#include "csrc/communicator/process_link.h"
#include "csrc/transport/transport.h"

namespace bagua {

class ControlLink : public ProcessLink::Route, public PeerMemory {
 public:
  // Callbacks of the link to its owner; called on the reactor thread.
  struct Events {
    // The peer reports a first cause, and who is lost; again when it knows of more.
    std::function<void(const Error&, const Losses&)> on_abort;
    std::function<void(const std::string& how)> on_lost;          // ended, and the peer had not left
    std::function<void(const ProcessLink::Silence&)> on_silence;  // at every tick; see ProcessLink::Route
    std::function<void(const Error&)> on_failure;                 // this rank can't go on
    // Why the peer leaves, if it does so because of a failure in another group of its process.
    std::function<void(const std::optional<Error>& why)> on_leave;
    std::function<void(const PeerStatus&)> on_status;
    std::function<PeerStatus(const StatusRequest&)> my_status;
    std::function<void()> on_segment;   // a mapping arrived
    std::function<void()> on_released;  // the peer freed a segment: unmap_released() when no rank reads it
  };

  // `group`: the key by which both ends know the group. `peer`: rank in it.
  ControlLink(std::shared_ptr<ProcessLink> link, std::string group, int peer);
  ~ControlLink() override;

  void start(Events events);
  void stop();  // after it no event is called

  void send_abort(const Error& cause, const Losses& losses);
  void send_leave(const std::optional<Error>& why = {});
  void request_status(const StatusRequest& request);
  ProcessLink& process_link() const { return *link_; }
  bool reaches_host() { return link_->reaches_host(); }

  // Sends a request for the segment when it is not mapped.
  void* map(const Address& address, size_t bytes) override;
  // Unmaps what the peer has released. Only between operations of the group's worker.
  void unmap_released();

  void on_frame(FrameType type, const uint8_t* payload, size_t bytes, Descriptor passed) override;
  void on_end(const std::string& how, bool said_goodbye) override;
  void on_silence(const ProcessLink::Silence& silence) override;
  void on_lost_descriptor() override;

 private:
  struct Mapping {
    void* data = nullptr;
    uint64_t bytes = 0;
  };
  void send_frame(FrameType type, const void* payload, size_t bytes, Descriptor pass = {});
  void send_segment(uint64_t id);
  void receive_segment(const uint8_t* payload, size_t bytes, Descriptor fd);

  const std::shared_ptr<ProcessLink> link_;
  const std::string group_;
  const int peer_;
  Events events_;
  bool is_routed_ = false;
  uint64_t subscription_ = 0;
  bool has_left_ = false;         // reactor thread, as the next
  bool had_left_before_ = false;  // it has said that it left before this rank came

  std::mutex segment_mutex_;  // guards the four below
  std::map<uint64_t, Mapping> mapped_;
  std::set<uint64_t> requested_;
  std::set<uint64_t> handed_out_;
  std::vector<Mapping> released_;
};

// The bytes that travel of a cause, and of the report of a first one.
std::vector<uint8_t> error_bytes(const Error& error);
std::vector<uint8_t> abort_bytes(const Error& cause, const Losses& losses);

}  // namespace bagua

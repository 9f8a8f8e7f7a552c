// TorchLink: what lies between a TorchChannel and the forwarder that moves its frames, two threads outside of the core
// that call torch.distributed: one direction each. Nothing here knows torch or Python; a frame is bytes of a known
// size.
//
// A message is a head (MessageHeader and the first payload bytes), which has one size whatever it holds, then frames of
// at most kFrameBytes, padded to one of kNumFrameSizes sizes. torch requires that both ends name the same size, and two
// ranks that call different operations do not: the forwarder gives every size a tag of its own, so that a frame which
// the other end does not expect is never received, while the heads meet and check_header shows both sides.
//
// Frames are copied to and from the forwarder's own memory: a receive that torch has begun cannot be withdrawn, so it
// must not be given memory of the caller's. A receive is done when its last byte has been copied. A send of a
// collective is done when torch has sent it, so that a rank which has left an operation has done its part whatever
// becomes of it; a peer that does not ask for it within kPatience gets it later, or its next message shows what it does
// instead. A message of send/recv is done when it has been copied, so that two ranks may both send before they receive.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/common/fifo.h"
#include "csrc/transport/transport.h"

namespace bagua {

// The sizes of frames, eight to a doubling, so that a ninth of one is padding at most: 4096, 4608, ..., 983040,
// 1048576.
inline constexpr int kNumFrameSizes = 65;
constexpr size_t frame_size_bytes(int size) { return static_cast<size_t>(8 + size % 8) << (9 + size / 8); }

class TorchLink {
 public:
  static constexpr size_t kHeadBytes = frame_size_bytes(0);
  static constexpr size_t kFrameBytes = frame_size_bytes(kNumFrameSizes - 1);
  static constexpr std::chrono::milliseconds kPatience{200};

  TorchLink(int peer, Doorbell& doorbell) : peer_(peer), doorbell_(&doorbell) {}

  // ---- the channel's side
  void post_send(const MessageHeader& header, const uint8_t* data, Request* request);
  void post_recv(const MessageHeader& header, uint8_t* data, Request* request);
  void throw_if_failed();
  // Completes sends that the peer has not asked for within kPatience; true if there was one.
  bool complete_overdue();
  // Forgets every message; when it has returned, neither their memory nor the doorbell is touched any more, and the
  // forwarder's threads are told to end. Final.
  void end();

  // ---- the forwarder's side; each direction is one thread's
  static constexpr int kNone = -1;   // there is no frame now; only when not blocking
  static constexpr int kEnded = -2;  // nor will there be
  // Copies the next frame to send into `frame` (kFrameBytes) and returns which size it has (0..kNumFrameSizes - 1).
  int take(uint8_t* frame, bool block);
  // The oldest frame that was taken has left.
  void sent();
  // The size of the next frame to receive.
  int expect(bool block);
  // The oldest expected frame has arrived.
  void deliver(const uint8_t* frame);
  // The first cause wins; the channel throws it.
  void fail(const Error& cause);

  // Whether anything that was posted has not left yet, and still can. [any thread]
  bool has_unsent();
  int peer() const { return peer_; }

 private:
  struct Message {
    MessageHeader header;
    uint8_t* data = nullptr;
    Request* request = nullptr;
    bool is_head_expected = false;
    bool is_head_moved = false;
    uint64_t expected = 0;  // payload bytes, as the next one
    uint64_t moved = 0;
  };
  struct Direction {
    std::mutex mutex;  // guards the fields below; held while a frame is copied, so that end() waits for it
    std::condition_variable changed;
    Fifo<Message> messages;
    bool has_ended = false;
  };
  void post(Direction& direction, const MessageHeader& header, uint8_t* data, Request* request);
  bool check_head(Message& message, const uint8_t* frame);
  void complete(Request* request);
  void ring();

  const int peer_;
  Direction out_;
  // A frame that was taken and has not been sent: the request that is done with it, or null.
  struct Leaving {
    Request* request = nullptr;
    std::chrono::steady_clock::time_point since;
  };
  Fifo<Leaving> leaving_;  // guarded by out_.mutex
  Direction in_;
  size_t num_expected_ = 0;  // messages at the front of in_ of which every frame is expected; guarded by in_.mutex

  std::mutex mutex_;    // guards the two below; taken last
  Doorbell* doorbell_;  // null after end()
  std::optional<Error> failure_;
  std::atomic<bool> has_failed_{false};
};

}  // namespace bagua

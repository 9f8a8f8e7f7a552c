// PinnedChannel: device memory over a channel that moves the host's.
//
// A message is cut into pieces of at most kPieceBytes, alike on both ends, and each piece is a message of the channel
// underneath. On its way it lies in one of a few pinned buffers per direction: while one piece is on the wire, the copy
// of the next one runs. Copies are enqueued on the message's own stream, so they need no further ordering: a send takes
// what was enqueued before it was posted, and what is enqueued after a receive finds its message.
//
// A send is done when its bytes have left, a receive when the copy of its last piece has been enqueued. Messages of
// host memory keep their place among the others.
#pragma once

#include <array>
#include <deque>
#include <memory>

#include "csrc/device/event.h"
#include "csrc/transport/transport.h"

namespace bagua {

class PinnedChannel final : public Channel {
 public:
  static constexpr size_t kPieceBytes = 256 << 10;
  static constexpr size_t kNumBuffers = 4;  // per direction

  // `host` outlives it.
  explicit PinnedChannel(Channel& host) : host_(host) {}

  void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) override;
  void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) override;
  bool progress() override;
  void cancel() override;
  bool moves_device_memory() const override { return true; }
  bool is_polled() const override;

  bool reports_end() const override { return host_.reports_end(); }
  bool addresses_any_memory() const override { return host_.addresses_any_memory(); }
  bool shares_memory() const override { return host_.shares_memory(); }
  void* resolve(const Address& address, size_t bytes) override { return host_.resolve(address, bytes); }
  const char* kind() const override { return host_.kind(); }

 private:
  // A posted message, as far as its pieces have been begun.
  struct Message {
    Operation operation;
    uint8_t* data;
    size_t bytes;
    Request* request;
    size_t begun = 0;

    // Needs no buffer: it is posted to the channel underneath as it is.
    bool is_passed_on() const { return request->stream.is_cpu() || bytes == 0; }
  };
  // A pinned buffer and what happens to the piece in it.
  struct Buffer {
    enum class State {
      kFree,
      kCopyingOut,  // from the device; then it is sent
      kSending,
      kReceiving,
      kCopyingIn,  // to the device; then it is free
    };
    State state = State::kFree;
    uint8_t* memory = nullptr;
    std::unique_ptr<device::OwnedEvent> copied;  // behind the last copy
    Request on_host;
    Operation operation;
    uint8_t* data = nullptr;  // of the piece, on the device
    size_t bytes = 0;
    Request* message = nullptr;  // whose piece it is
    bool is_last = false;        // of its message
  };
  // The messages of one direction and the buffers of their pieces, which are taken in turns.
  struct Direction {
    std::deque<Message> messages;  // with pieces that have not been begun
    std::array<Buffer, kNumBuffers> buffers;
    void* memory = nullptr;      // of all buffers, made with the first piece
    Device device;               // whose runtime made it
    bool are_abandoned = false;  // the buffers: to a device that may still use them, for good
    size_t oldest = 0;
    size_t num_used = 0;  // from the oldest on

    ~Direction();
    bool has_free() const { return num_used < kNumBuffers; }
    Buffer& used(size_t i) { return buffers[(oldest + i) % kNumBuffers]; }
    bool is_in(Buffer::State state) const;
    // A free buffer, for the next piece of the first message, which is taken off the queue with its last piece.
    Buffer& begin_piece();
    void free_oldest();
    void wait_for_copies();
  };

  bool begin_sends();
  bool begin_receives();
  bool advance_sends();
  bool advance_receives();

  Channel& host_;
  Direction out_;
  Direction in_;
};

}  // namespace bagua

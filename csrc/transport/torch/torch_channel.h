// TorchChannel: messages to a peer through any process group of torch.distributed (gloo, MPI, UCC, ...).
//
// The channel only queues; the bytes are moved by a forwarder that calls torch, outside of the core. The two share a
// TorchLink, which outlives the channel: a thread that is stuck in torch may let go of it later.
#pragma once

#include <memory>
#include <utility>

#include "csrc/transport/torch/torch_link.h"
#include "csrc/transport/transport.h"

namespace bagua {

class TorchChannel : public Channel {
 public:
  explicit TorchChannel(std::shared_ptr<TorchLink> link) : link_(std::move(link)) {}
  ~TorchChannel() override { link_->end(); }

  void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) override {
    link_->post_send({operation, bytes}, static_cast<const uint8_t*>(data), request);
  }
  void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) override {
    link_->post_recv({operation, bytes}, static_cast<uint8_t*>(data), request);
  }
  bool progress() override {
    link_->throw_if_failed();
    return link_->complete_overdue();  // the forwarder moves the bytes
  }
  void cancel() override { link_->end(); }
  const char* kind() const override { return "torch"; }

 private:
  const std::shared_ptr<TorchLink> link_;
};

}  // namespace bagua

// A stand-in for torch.distributed under two TorchLinks: a thread per direction that forwards one frame after the other
// and, as gloo does, sends a frame only when the other end asks for one of that size.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/transport/torch/torch_link.h"

namespace bagua::testing {

// Forwards frames until either link ends, or the ends disagree about a size: then, as with torch, nothing more comes.
inline void forward_frames(TorchLink& from, TorchLink& to) {
  std::vector<uint8_t> frame(TorchLink::kFrameBytes, 0xee);
  for (;;) {
    const int size = from.take(frame.data(), true);
    if (size == TorchLink::kEnded || to.expect(true) != size) return;
    to.deliver(frame.data());
    from.sent();
  }
}

// The threads of every pair of links; each ends with its links.
class Forwarders {
 public:
  static Forwarders& instance() {
    static Forwarders forwarders;
    return forwarders;
  }
  ~Forwarders() {
    for (Forwarder& forwarder : forwarders_) forwarder.thread.join();
  }
  // Called by one thread at a time. Joins the ones that have ended.
  void connect(std::shared_ptr<TorchLink> from, std::shared_ptr<TorchLink> to) {
    forwarders_.remove_if([](Forwarder& forwarder) {
      if (forwarder.is_running->load()) return false;
      forwarder.thread.join();
      return true;
    });
    auto is_running = std::make_shared<std::atomic<bool>>(true);
    std::thread thread([from = std::move(from), to = std::move(to), is_running] {
      forward_frames(*from, *to);
      is_running->store(false);
    });
    forwarders_.push_back({std::move(thread), std::move(is_running)});
  }

 private:
  struct Forwarder {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> is_running;
  };
  std::list<Forwarder> forwarders_;
};

}  // namespace bagua::testing

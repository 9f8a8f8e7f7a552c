// Reactor: the one epoll thread of the process ("bagua-reactor"). It moves the bytes of TCP streams and
// the frames of links between processes; it never runs a kernel and never takes the GIL.
//
// Handlers are edge-triggered: on_ready must read and write until EAGAIN. A handler is called under the
// reactor's lock, so when remove() has returned, it is not running and will not run again. Lock order:
// reactor, then whatever lock the handler takes; code that holds a handler's lock must not call the reactor.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/common/fork_guard.h"

namespace bagua {

class Reactor {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_ready() = 0;
    // At the intervals that add() was given, or later on a busy machine.
    virtual void on_tick() {}
  };

  // The process-wide instance, started on first use. Shared by its users: the last one to let go joins the thread.
  static std::shared_ptr<Reactor> instance();

  Reactor();
  ~Reactor();

  // Watches `fd` for input and output; returns an id for remove(). `handler` must outlive the registration. A `tick` of
  // 0 is none. Throws TransportError where the kernel takes no more.
  uint64_t add(int fd, Handler* handler, std::chrono::milliseconds tick = {});
  void remove(uint64_t id);

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    int fd;
    Handler* handler;
    std::chrono::milliseconds tick;
    Clock::time_point next_tick;
  };
  void run();
  void call(uint64_t id, void (Handler::*what)());
  void wake();
  int until_tick_ms();
  void tick();

  Descriptor epoll_;
  Descriptor wake_;
  std::recursive_mutex mutex_;  // guards what follows, and the running of handlers, which may remove themselves
  std::map<uint64_t, Entry> entries_;
  std::vector<uint64_t> due_;  // of tick(); its memory comes from add(), which may throw
  Clock::time_point next_tick_ = Clock::time_point::max();
  uint64_t next_id_ = 1;
  bool stopping_ = false;
  std::thread thread_;  // joined by the destructor
};

}  // namespace bagua

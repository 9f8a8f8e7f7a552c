// Reactor: the one epoll thread of the process ("bagua-reactor"). It moves the bytes of TCP streams and
// the frames of control links; it never runs a kernel and never takes the GIL.
//
// Handlers are edge-triggered: on_ready must read and write until EAGAIN. A handler is called under the
// reactor's lock, so when remove() has returned, it is not running and will not run again. Lock order:
// reactor, then whatever lock the handler takes; code that holds a handler's lock must not call the reactor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "csrc/common/fork_guard.h"

namespace bagua {

class Reactor {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void on_ready() = 0;
  };

  // The process-wide instance, started on first use. Shared by its users: the last one to let go joins the thread.
  static std::shared_ptr<Reactor> instance();

  Reactor();
  ~Reactor();

  // Watches `fd` for input and output; returns an id for remove(). `handler` must outlive the registration.
  uint64_t add(int fd, Handler* handler);
  void remove(uint64_t id);

 private:
  struct Entry {
    int fd;
    Handler* handler;
  };
  void run();

  Descriptor epoll_;
  Descriptor wake_;
  std::recursive_mutex mutex_;  // guards entries_ and the running of handlers; recursive: a handler may remove itself
  std::map<uint64_t, Entry> entries_;
  uint64_t next_id_ = 1;
  bool stopping_ = false;
  std::thread thread_;  // joined by the destructor
};

}  // namespace bagua

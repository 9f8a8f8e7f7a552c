// The epoll loop; see reactor.h for who may call what.
#include "csrc/common/reactor.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "csrc/common/error.h"
#include "csrc/common/thread.h"

namespace bagua {

namespace {

struct Current {
  std::mutex mutex;  // guards reactor
  std::weak_ptr<Reactor> reactor;
};
PerProcess<Current> current_of_process;

}  // namespace

std::shared_ptr<Reactor> Reactor::instance() {
  Current& current = current_of_process.get();
  std::lock_guard lock(current.mutex);
  auto reactor = current.reactor.lock();
  if (!reactor) {
    reactor = std::make_shared<Reactor>();
    current.reactor = reactor;
  }
  return reactor;
}

Reactor::Reactor() {
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (epoll_.get() < 0 || wake_.get() < 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    throw Error(ErrorKind::kTransport, std::string("cannot create the epoll instance: ") + std::strerror(errno) +
                                           (errno == EMFILE || errno == ENFILE ? "; raise `ulimit -n`" : ""));
  }
  thread_ = start_thread("bagua-reactor", [this] { run(); });
}

Reactor::~Reactor() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_
      .join();  // never on the reactor's own thread: handlers are owned by communicators, which Python threads destroy
}

void Reactor::wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

uint64_t Reactor::add(int fd, Handler* handler, std::chrono::milliseconds tick) {
  std::lock_guard lock(mutex_);
  const uint64_t id = next_id_++;
  due_.reserve(entries_.size() + 1);
  entries_[id] = {fd, handler, tick, Clock::now() + tick};
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    entries_.erase(id);
    throw Error(ErrorKind::kTransport, std::string("epoll refuses a connection: ") + std::strerror(errno));
  }
  if (tick.count() > 0) {
    next_tick_ = std::min(next_tick_, entries_[id].next_tick);
    wake();  // it may sleep for longer
  }
  return id;
}

void Reactor::remove(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
  entries_.erase(found);
}

void Reactor::run() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), until_tick_ms());
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == 0) {
        uint64_t wakes;
        (void)!read(wake_.get(), &wakes, sizeof wakes);
        continue;
      }
      // One lock per event: an entry that an earlier handler of this batch removed is not found any more.
      std::lock_guard lock(mutex_);
      call(id, &Handler::on_ready);
    }
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    if (Clock::now() >= next_tick_) tick();
  }
}

// The lock is held.
void Reactor::call(uint64_t id, void (Handler::*what)()) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  (found->second.handler->*what)();
}

int Reactor::until_tick_ms() {
  std::lock_guard lock(mutex_);
  if (next_tick_ == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - Clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

// Ticks what is due, and finds out when the next is. The lock is held.
void Reactor::tick() {
  const auto now = Clock::now();
  due_.clear();
  next_tick_ = Clock::time_point::max();
  for (auto& [id, entry] : entries_) {
    if (entry.tick.count() == 0) continue;
    if (entry.next_tick <= now) {
      due_.push_back(id);
      entry.next_tick = now + entry.tick;
    }
    next_tick_ = std::min(next_tick_, entry.next_tick);
  }
  for (size_t i = 0; i < due_.size(); ++i) call(due_[i], &Handler::on_tick);  // which may remove itself or another
}

}  // namespace bagua

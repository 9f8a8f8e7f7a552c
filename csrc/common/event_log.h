// What the worker thread did when: spans with nanosecond clocks in a ring of fixed size, cheap enough to
// stay on. Written by the group's worker, read from any thread; a reader may miss spans that are older
// than the ring, never sees a torn one.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace bagua {

enum class EventKind : uint8_t { kQueued = 0, kOperation, kEncode, kWire, kDecode, kReduce };

struct Event {
  uint64_t ticket = 0;  // which submitted Work it belongs to
  EventKind kind = EventKind::kQueued;
  int64_t begin_ns = 0;  // steady clock
  int64_t end_ns = 0;
  uint64_t bytes = 0;
};

class EventLog {
 public:
  static constexpr size_t kCapacity = 8192;

  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  // Which Work the following spans belong to.
  void set_ticket(uint64_t ticket) { ticket_ = ticket; }

  void add(EventKind kind, int64_t begin_ns, int64_t end_ns, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    if (ring_.size() < kCapacity) {
      ring_.push_back({ticket_, kind, begin_ns, end_ns, bytes});
    } else {
      ring_[next_ % kCapacity] = {ticket_, kind, begin_ns, end_ns, bytes};
    }
    ++next_;
  }

  // The recorded spans, oldest first; with `clear` they are forgotten.
  std::vector<Event> take(bool clear) {
    std::lock_guard lock(mutex_);
    std::vector<Event> events;
    events.reserve(ring_.size());
    const size_t start = ring_.size() < kCapacity ? 0 : next_ % kCapacity;
    for (size_t i = 0; i < ring_.size(); ++i) events.push_back(ring_[(start + i) % ring_.size()]);
    if (clear) {
      ring_.clear();
      next_ = 0;
    }
    return events;
  }

 private:
  std::mutex mutex_;  // guards ring_ and next_
  std::vector<Event> ring_;
  size_t next_ = 0;
  uint64_t ticket_ = 0;  // worker thread only
};

// Records the lifetime of a scope.
class EventSpan {
 public:
  EventSpan(EventLog& log, EventKind kind, uint64_t bytes)
      : log_(log), kind_(kind), bytes_(bytes), begin_ns_(EventLog::now_ns()) {}
  ~EventSpan() { log_.add(kind_, begin_ns_, EventLog::now_ns(), bytes_); }
  EventSpan(const EventSpan&) = delete;
  EventSpan& operator=(const EventSpan&) = delete;

 private:
  EventLog& log_;
  EventKind kind_;
  uint64_t bytes_;
  int64_t begin_ns_;
};

}  // namespace bagua

// A log of what the worker thread did: spans with nanosecond clocks in rings of bounded size, cheap enough to stay on.
// Written by the group's worker, read from any thread; a reader may miss spans that are older than the ring, never sees
// a torn one. Operations have a ring of their own, so that the many parts of one under a codec drive no other out.
// Spans without memory for their ring are not kept, and count as lost: no operation fails for want of it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace bagua {

enum class EventKind : uint8_t { kQueued = 0, kOperation, kEncode, kWire, kDecode, kReduce };

struct Event {
  uint64_t ticket = 0;  // which submitted Work it belongs to
  EventKind kind = EventKind::kQueued;
  bool waits_for_some = false;  // of a kOperation: its rank took values from some of the others only
  int64_t begin_ns = 0;         // steady clock; of a kOperation on a device: when the device came to it, as its end
  int64_t end_ns = 0;
  uint64_t bytes = 0;
  uint64_t bytes_sent = 0;  // of a kOperation: the payload that its rank has sent
};

class EventLog {
 public:
  static constexpr size_t kOperationSpans = 8192;  // kQueued and kOperation: two for each operation
  static constexpr size_t kPartSpans = 65536;

  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  // Sets the Work that the following spans belong to. On a device the host only enqueues arithmetic, and what that
  // takes says nothing of the work: such spans are not kept.
  void set_ticket(uint64_t ticket, bool is_on_device = false) {
    ticket_ = ticket;
    is_on_device_ = is_on_device;
    waits_for_some_ = false;
  }
  // Says it of the operation under way.
  void set_waits_for_some() { waits_for_some_ = true; }
  bool waits_for_some() const { return waits_for_some_; }

  void add(EventKind kind, int64_t begin_ns, int64_t end_ns, uint64_t bytes, uint64_t bytes_sent = 0) noexcept {
    if (is_on_device_ && is_arithmetic(kind)) return;
    const bool is_operation = kind == EventKind::kOperation;
    std::lock_guard lock(mutex_);
    Ring& ring = is_operation || kind == EventKind::kQueued ? operations_ : parts_;
    ring.add({ticket_, kind, is_operation && waits_for_some_, begin_ns, end_ns, bytes, bytes_sent});
  }

  // A kOperation of a device, which ends while others are under way.
  void add_operation(uint64_t ticket, bool waits_for_some, int64_t begin_ns, int64_t end_ns, uint64_t bytes,
                     uint64_t bytes_sent) noexcept {
    std::lock_guard lock(mutex_);
    operations_.add({ticket, EventKind::kOperation, waits_for_some, begin_ns, end_ns, bytes, bytes_sent});
  }

  // The recorded spans that ended later than `after_ns`, oldest first; with `clear` all are forgotten. Both rings are
  // in the order of the ends, since spans are added as they end; but that a device has ended is seen a little later.
  std::vector<Event> take(bool clear, bool with_parts = true, int64_t after_ns = 0) {
    std::lock_guard lock(mutex_);
    const auto ends_before = [](const Event& a, const Event& b) { return a.end_ns < b.end_ns; };
    std::vector<Event> events = operations_.in_order(after_ns);
    if (!std::is_sorted(events.begin(), events.end(), ends_before)) {
      std::stable_sort(events.begin(), events.end(), ends_before);
    }
    if (with_parts && !parts_.events.empty()) {
      const std::vector<Event> operations = std::move(events), parts = parts_.in_order(after_ns);
      events.resize(operations.size() + parts.size());
      std::merge(operations.begin(), operations.end(), parts.begin(), parts.end(), events.begin(), ends_before);
    }
    if (clear) {
      operations_.clear();
      parts_.clear();
    }
    return events;
  }

  // The times since when spans of operations, and of their parts, are complete: those of operations that began later
  // than this are all there; 0 if none is lost.
  std::pair<int64_t, int64_t> kept_since_ns() {
    std::lock_guard lock(mutex_);
    return {operations_.lost_until_ns, parts_.lost_until_ns};
  }

 private:
  static bool is_arithmetic(EventKind kind) {
    return kind == EventKind::kEncode || kind == EventKind::kDecode || kind == EventKind::kReduce;
  }

  struct Ring {
    const size_t capacity;
    std::vector<Event> events;
    size_t oldest = 0;
    int64_t lost_until_ns = 0;  // the end of the last span that was overwritten or cleared

    void add(const Event& event) {
      if (events.capacity() < capacity) {  // all of it with the first span: what grows for hours looks like a leak
        events.resize(capacity);
        events.clear();
      }
      if (events.size() < capacity) {
        events.push_back(event);
        return;
      }
      lost_until_ns = std::max(lost_until_ns, events[oldest].end_ns);
      events[oldest] = event;
      oldest = (oldest + 1) % capacity;
    }
    std::vector<Event> in_order(int64_t after_ns) const {
      std::vector<Event> ordered;
      for (size_t i = 0; i < events.size(); ++i) {
        const Event& event = events[(oldest + i) % events.size()];
        if (event.end_ns > after_ns) ordered.push_back(event);
      }
      return ordered;
    }
    void clear() {
      for (const Event& event : events) lost_until_ns = std::max(lost_until_ns, event.end_ns);
      events.clear();
      oldest = 0;
    }
  };

  std::mutex mutex_;  // guards the two rings
  Ring operations_{kOperationSpans, {}};
  Ring parts_{kPartSpans, {}};
  uint64_t ticket_ = 0;  // worker thread only, as the next two
  bool is_on_device_ = false;
  bool waits_for_some_ = false;
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

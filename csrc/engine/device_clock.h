// DeviceClock: when a device came to an event, on the host's clock, for the timeline.
//
// A reference event is recorded on an idle stream and awaited with the host's clock around every look, which says when
// it was to within some microseconds; other events are their distance from it, which the device measures. Clocks drift
// apart and distances lose digits, so the reference is renewed, once a second at most and only while the stream has
// nothing to do: no operation waits for it. One thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>

#include "csrc/common/event_log.h"
#include "csrc/device/runtime.h"

namespace bagua {

class DeviceClock {
 public:
  explicit DeviceClock(Stream stream)
      : runtime_(device::runtime_of(stream.device)),
        stream_(stream),
        reference_(runtime_.create_timing_event(stream.device)),
        candidate_(runtime_.create_timing_event(stream.device)) {}
  ~DeviceClock() {
    runtime_.destroy_event(reference_);
    runtime_.destroy_event(candidate_);
  }
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // To be called while the stream is idle. Takes tens of microseconds where the reference is old, and at most
  // kLongestWait where the device is busy with something else; then the old one stays, and a later call tries again.
  void renew_if_old() {
    const int64_t now_ns = EventLog::now_ns();
    if (now_ns < due_ns_) return;
    due_ns_ = now_ns + kPause.count();
    int64_t narrowest_ns = kLongestWait.count();
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      // The device comes to the event between the last look that did not find it done, and the end of the next one.
      int64_t earliest_ns = EventLog::now_ns();
      const int64_t give_up_ns = earliest_ns + kLongestWait.count();
      runtime_.record(candidate_, stream_);
      for (;;) {
        const int64_t look_ns = EventLog::now_ns();
        if (runtime_.is_done(candidate_)) break;
        if (look_ns > give_up_ns) return;
        earliest_ns = look_ns;
        std::this_thread::yield();
      }
      const int64_t window_ns = EventLog::now_ns() - earliest_ns;
      if (window_ns >= narrowest_ns) continue;
      narrowest_ns = window_ns;
      due_ns_ = now_ns + kRenewalInterval.count();
      std::swap(reference_, candidate_);
      reference_ns_ = earliest_ns + window_ns / 2;
    }
  }

  // The time of a timing event of the device that is done, as exactly as the reference was taken; nothing before the
  // first one.
  std::optional<int64_t> host_ns(device::Event event) const {
    if (reference_ns_ == 0) return std::nullopt;
    return reference_ns_ + runtime_.elapsed_ns(reference_, event);
  }

 private:
  static constexpr std::chrono::nanoseconds kRenewalInterval = std::chrono::seconds(1);
  static constexpr std::chrono::nanoseconds kPause = std::chrono::milliseconds(100);  // after an attempt in vain
  static constexpr std::chrono::nanoseconds kLongestWait = std::chrono::milliseconds(1);
  static constexpr int kAttempts = 3;  // the narrowest of them counts

  device::Runtime& runtime_;
  const Stream stream_;
  device::Event reference_;
  device::Event candidate_;   // for the next reference
  int64_t reference_ns_ = 0;  // 0: none yet
  int64_t due_ns_ = 0;
};

}  // namespace bagua

// DeviceSide: what a group keeps on one device: the stream on which its operations run, scratch memory, pinned memory
// of the host, and events that say when an operation ran. For the group's worker thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/device/event.h"
#include "csrc/device/workspace.h"
#include "csrc/engine/device_clock.h"

namespace bagua {

class DeviceSide {
 public:
  explicit DeviceSide(Device device)
      : runtime_(device::runtime_of(device)),
        stream_(runtime_.create_stream(device)),
        workspace_(stream_),
        clock_(stream_) {}
  ~DeviceSide() {
    for (const auto& interval : intervals_) {
      runtime_.destroy_event(interval->begin);
      runtime_.destroy_event(interval->end);
    }
    workspace_.clear();
    // A device that hangs or has failed may still write there, so it keeps them.
    if (has_come_to_an_end()) {
      for (void* block : blocks_) runtime_.free_pinned(block);
    }
    runtime_.destroy_stream(stream_);
  }
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  Stream stream() const { return stream_; }
  Workspace& workspace() { return workspace_; }
  const Workspace& workspace() const { return workspace_; }
  DeviceClock& clock() { return clock_; }
  void record(device::Event event) { runtime_.record(event, stream_); }
  int64_t logged_until_ns = 0;  // the end of the last operation in the log

  // At least so many bytes of pinned memory, until it is asked for again: for a tensor that the host works on. What was
  // smaller is kept, since a copy may use it.
  void* pinned(size_t bytes) {
    if (bytes > pinned_bytes_) {
      const size_t larger = std::max(bytes, 2 * pinned_bytes_);
      blocks_.reserve(blocks_.size() + 1);
      blocks_.push_back(pinned_ = runtime_.allocate_pinned(larger));
      pinned_bytes_ = larger;
    }
    return pinned_;
  }

  // Two timing events, of an operation's begin and its end; they go back to their side, which outlives them.
  struct IntervalEvents {
    device::Event begin;
    device::Event end;
  };
  using Interval = std::unique_ptr<IntervalEvents, std::function<void(IntervalEvents*)>>;

  Interval take_interval() {
    if (free_intervals_.empty()) {
      const Device device = stream_.device;
      auto made = std::make_unique<IntervalEvents>();
      made->begin = runtime_.create_timing_event(device);
      made->end = runtime_.create_timing_event(device);
      free_intervals_.push_back(made.get());
      intervals_.push_back(std::move(made));
    }
    IntervalEvents* const interval = free_intervals_.back();
    free_intervals_.pop_back();
    return {interval, [this](IntervalEvents* taken) { free_intervals_.push_back(taken); }};
  }

 private:
  bool has_come_to_an_end() const {
    try {
      return device::is_done_by(Deadline::after(device::kLongestWork), *device::recorded_event(stream_));
    } catch (const Error&) {
      return false;
    }
  }

  device::Runtime& runtime_;
  const Stream stream_;
  Workspace workspace_;
  std::vector<void*> blocks_;
  void* pinned_ = nullptr;  // of blocks_
  size_t pinned_bytes_ = 0;
  DeviceClock clock_;
  std::vector<std::unique_ptr<IntervalEvents>> intervals_;
  std::vector<IntervalEvents*> free_intervals_;
};

}  // namespace bagua

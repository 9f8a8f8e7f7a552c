// SharedEvent: an event that goes back to its runtime with the last who holds it.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "csrc/common/deadline.h"
#include "csrc/common/error.h"
#include "csrc/device/runtime.h"

namespace bagua::device {

class OwnedEvent {
 public:
  explicit OwnedEvent(Device device)
      : runtime_(runtime_of(device)), device_(device), event_(runtime_.create_event(device)) {}
  ~OwnedEvent() { runtime_.destroy_event(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  Device device() const { return device_; }
  void record(Stream stream) { runtime_.record(event_, stream); }
  bool is_done() const { return runtime_.is_done(event_); }
  // Makes what is enqueued on `stream` from here on wait for what was recorded last.
  void let_wait(Stream stream) const { runtime_.wait(stream, event_); }

 private:
  Runtime& runtime_;
  const Device device_;
  const Event event_;
};

// Enqueued work waits for nothing but what the device had to do before: one that needs longer hangs.
inline constexpr std::chrono::seconds kLongestWork{10};

// Blocks until the device has come to what was recorded; `meanwhile` is called between looks. False where it has not
// come there by the deadline, or has failed.
template <typename Meanwhile>
bool is_done_by(Deadline deadline, OwnedEvent& event, Meanwhile meanwhile) {
  try {
    while (!event.is_done()) {
      if (deadline.expired()) return false;
      meanwhile();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}
inline bool is_done_by(Deadline deadline, OwnedEvent& event) {
  return is_done_by(deadline, event, [] {});
}

using SharedEvent = std::shared_ptr<OwnedEvent>;

inline SharedEvent recorded_event(Stream stream) {
  auto event = std::make_shared<OwnedEvent>(stream.device);
  event->record(stream);
  return event;
}

}  // namespace bagua::device

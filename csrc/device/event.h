// SharedEvent: an event that goes back to its runtime with the last who holds it.
#pragma once

#include <memory>

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
  // What is enqueued on `stream` from here on waits for what was recorded last.
  void let_wait(Stream stream) const { runtime_.wait(stream, event_); }

 private:
  Runtime& runtime_;
  const Device device_;
  const Event event_;
};

using SharedEvent = std::shared_ptr<OwnedEvent>;

inline SharedEvent recorded_event(Stream stream) {
  auto event = std::make_shared<OwnedEvent>(stream.device);
  event->record(stream);
  return event;
}

}  // namespace bagua::device

// A point in time by which a blocking call must have ended. Every blocking call of the core takes one;
// there is no infinite deadline.
#pragma once

#include <chrono>

namespace bagua {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::nanoseconds duration) { return Deadline(Clock::now() + duration, duration); }

  bool expired() const { return Clock::now() >= at_; }
  std::chrono::nanoseconds remaining() const {
    const auto left = at_ - Clock::now();
    return left.count() > 0 ? std::chrono::nanoseconds(left) : std::chrono::nanoseconds(0);
  }
  // How long the caller allowed in all, for error messages.
  double allowed_seconds() const { return std::chrono::duration<double>(allowed_).count(); }

 private:
  Deadline(Clock::time_point at, std::chrono::nanoseconds allowed) : at_(at), allowed_(allowed) {}

  Clock::time_point at_;
  std::chrono::nanoseconds allowed_;
};

}  // namespace bagua

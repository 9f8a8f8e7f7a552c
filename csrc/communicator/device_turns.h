// DeviceTurns: in which order the groups of this process enqueue on a device over a device transport: the same on all
// ranks. What is enqueued may wait for peers on the device, and keep what another group has enqueued from running; NCCL
// asks for one order of all its operations on a device.
//
// If a rank has several such groups, an operation that all ranks of its group have begun gets a number, the largest
// of those that its ranks propose, each above all that its rank has heard of. Operations take turns by their numbers.
// One with a proposal only may come to be before later ones, which wait for its number: not for long, its ranks are all
// there. Source: Skeen's algorithm, in Birman and Joseph, "Reliable communication in the presence of failures", 1987.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/device/event.h"

namespace bagua {

class DeviceTurns {
 public:
  // Returns the turns of the device's groups in this process.
  static DeviceTurns& of(Device device);

  // While one lives, a group may enqueue on the device. [any thread]
  class Member {
   public:
    explicit Member(DeviceTurns& turns);
    ~Member();
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

    DeviceTurns& turns() const { return turns_; }
    bool has_others() const;

   private:
    DeviceTurns& turns_;
  };

  // The end of what was enqueued, and of which group it was.
  struct Enqueued {
    device::SharedEvent end;  // null: nothing was
    std::string group;
  };

  // A turn of one operation of a group, `key` of which is the same on all its ranks and no other group's; until end().
  class Turn {
   public:
    Turn(DeviceTurns& turns, std::string key, std::string group);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    uint64_t number() const { return number_; }  // proposed, then agreed
    void agree(uint64_t number);
    bool has_come() const;
    // Now that it has: what is enqueued on `stream` from here on stands behind the turns before, the last of which is
    // returned.
    Enqueued begin(Stream stream);
    // All of it is enqueued.
    void end(Stream stream) noexcept;

   private:
    bool is_before(const Turn& other) const;

    DeviceTurns& turns_;
    const std::string key_, group_;
    uint64_t number_;
    bool has_begun_ = false;
  };

 private:
  mutable std::mutex mutex_;  // guards the rest, and the numbers of turns
  int num_members_ = 0;
  uint64_t last_number_ = 0;
  std::vector<const Turn*> turns_;
  Enqueued enqueued_;  // by the last turn that has ended
};

}  // namespace bagua

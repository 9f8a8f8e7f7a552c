// The queue of one device; see device_turns.h.
#include "csrc/communicator/device_turns.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "csrc/common/error.h"

namespace bagua {

DeviceTurns& DeviceTurns::of(Device device) {
  static std::mutex mutex;  // guards the map, whose entries live as long as the process
  static auto& turns = *new std::map<std::pair<DeviceKind, int>, DeviceTurns>;
  std::lock_guard lock(mutex);
  return turns[{device.kind, device.index}];
}

DeviceTurns::Member::Member(DeviceTurns& turns) : turns_(turns) {
  std::lock_guard lock(turns_.mutex_);
  ++turns_.num_members_;
}

DeviceTurns::Member::~Member() {
  Enqueued last;  // goes back to its device without the lock
  std::lock_guard lock(turns_.mutex_);
  if (--turns_.num_members_ == 0) last = std::exchange(turns_.enqueued_, {});
}

bool DeviceTurns::Member::has_others() const {
  std::lock_guard lock(turns_.mutex_);
  return turns_.num_members_ > 1;
}

DeviceTurns::Turn::Turn(DeviceTurns& turns, std::string key, std::string group)
    : turns_(turns), key_(std::move(key)), group_(std::move(group)) {
  std::lock_guard lock(turns_.mutex_);
  number_ = ++turns_.last_number_;
  turns_.turns_.push_back(this);
}

DeviceTurns::Turn::~Turn() {
  std::lock_guard lock(turns_.mutex_);
  std::erase(turns_.turns_, this);
}

void DeviceTurns::Turn::agree(uint64_t number) {
  std::lock_guard lock(turns_.mutex_);
  number_ = number;
  turns_.last_number_ = std::max(turns_.last_number_, number);
}

bool DeviceTurns::Turn::is_before(const Turn& other) const {
  return std::tie(number_, key_) < std::tie(other.number_, other.key_);
}

bool DeviceTurns::Turn::has_come() const {
  std::lock_guard lock(turns_.mutex_);
  return std::none_of(turns_.turns_.begin(), turns_.turns_.end(),
                      [this](const Turn* other) { return other->is_before(*this); });
}

DeviceTurns::Enqueued DeviceTurns::Turn::begin(Stream stream) {
  Enqueued before;
  {
    std::lock_guard lock(turns_.mutex_);
    before = turns_.enqueued_;
  }
  has_begun_ = true;
  if (before.end != nullptr) before.end->let_wait(stream);
  return before;
}

void DeviceTurns::Turn::end(Stream stream) noexcept {
  if (!std::exchange(has_begun_, false)) return;
  Enqueued enqueued;
  try {
    enqueued.group = group_;
    enqueued.end = device::recorded_event(stream);
  } catch (const Error&) {  // a device that is lost: nothing runs there
  }
  std::lock_guard lock(turns_.mutex_);
  std::swap(turns_.enqueued_, enqueued);
}

}  // namespace bagua

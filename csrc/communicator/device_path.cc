// The agreement of ranks about their devices; see device_path.h.
#include "csrc/communicator/device_path.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "csrc/common/error.h"
#include "csrc/device/runtime.h"

namespace bagua {
namespace {

template <size_t kBytes>
void copy_text(char (&to)[kBytes], const std::string& text) {
  const size_t count = std::min(kBytes - 1, text.size());
  std::memcpy(to, text.data(), count);
  to[count] = '\0';
}

// Text that a rank received may lack its end.
template <size_t kBytes>
std::string text_of(const char (&from)[kBytes]) {
  return std::string(from, strnlen(from, kBytes));
}

std::string rank_text(size_t rank) { return "rank " + std::to_string(rank); }

std::optional<size_t> who_asks(const std::vector<DeviceNote>& notes, DeviceChoice choice) {
  for (size_t r = 0; r < notes.size(); ++r) {
    if (notes[r].asked == choice) return r;
  }
  return std::nullopt;
}

// Whether two ranks have parts of one physical device, with ids of their own: the transport goes by its place.
bool have_parts_of_one(const DeviceNote& one, const DeviceNote& other) {
  const std::string bus_id = text_of(one.bus_id);
  return !bus_id.empty() && bus_id == text_of(other.bus_id) && one.host == other.host;
}

// Says what keeps the ranks from the transport; empty: nothing. That it can serve ranks which share a device does not
// make it the faster way for them, so some rank has to ask for it.
std::string obstacle(const std::vector<DeviceNote>& notes, const DeviceTransportSource& source, bool is_asked_for) {
  std::string lacking;
  for (size_t r = 0; r < notes.size(); ++r) {
    if (notes[r].version != 0) continue;
    if (!lacking.empty()) lacking += "; ";
    lacking += rank_text(r) + " has no usable " + source.name() + ": " + text_of(notes[r].why_not);
  }
  if (!lacking.empty()) return lacking;
  for (size_t r = 1; r < notes.size(); ++r) {
    // It connects equal versions only.
    if (notes[r].version != notes[0].version) {
      return rank_text(0) + " has " + source.name() + " " + source.version_name(notes[0].version) + ", " +
             rank_text(r) + " has " + source.version_name(notes[r].version);
    }
    for (size_t other = 0; other < r; ++other) {
      const bool is_same = text_of(notes[r].device_id) == text_of(notes[other].device_id);
      if (!is_same && !have_parts_of_one(notes[r], notes[other])) continue;
      const bool can_share = notes[r].host != notes[other].host || (notes[r].may_share && notes[other].may_share);
      if (can_share && is_asked_for) continue;
      const std::string ranks = "ranks " + std::to_string(other) + " and " + std::to_string(r);
      const std::string shared = is_same ? ranks + " share the device " + text_of(notes[r].device_id)
                                         : ranks + " have parts of the device " + text_of(notes[r].bus_id);
      if (!can_share) return shared + ", and " + source.name() + " needs one for each";
      return shared + (is_same ? ", which they take turns on" : "") + ": ask for 'nccl' to have it all the same";
    }
  }
  return "";
}

}  // namespace

DeviceChoice device_choice_from(const std::string& name) {
  if (name == "auto") return DeviceChoice::kAuto;
  if (name == "nccl") return DeviceChoice::kNative;
  if (name == "staged") return DeviceChoice::kStaged;
  throw Error(ErrorKind::kInvalidArgument, "device_transport is '" + name + "', expected 'auto', 'nccl' or 'staged'");
}

DeviceDecision decide_device_path(const std::vector<DeviceNote>& notes, const DeviceTransportSource& source) {
  const auto native = who_asks(notes, DeviceChoice::kNative), staged = who_asks(notes, DeviceChoice::kStaged);
  if (native && staged) {
    throw Error(ErrorKind::kInvalidArgument, rank_text(*native) + " asks for " + source.name() + " and " +
                                                 rank_text(*staged) +
                                                 " for staging; ask for the same on all ranks of a group");
  }
  if (staged) return {false, rank_text(*staged) + " asks for it"};
  const std::string why = obstacle(notes, source, native.has_value());
  if (why.empty()) return {true, ""};
  if (native) {
    throw Error(ErrorKind::kInvalidArgument, rank_text(*native) + " asks for " + source.name() + ", but " + why +
                                                 "; ask for 'auto' or 'native' to go on without");
  }
  return {false, why};
}

DeviceTransport* DevicePath::enter(Stream stream) {
  const Device device = stream.device;
  if (!is_chosen_) {
    choose(stream);
    return transport_.get();
  }
  if (transport_ == nullptr) return nullptr;
  if (device != transport_->device()) {
    throw Error(ErrorKind::kInvalidArgument,
                "tensors are on " + device_name(device) + ", but group '" + group_.ranks.group + "' has connected " +
                    device_name(transport_->device()) + " of this rank by " + source_->name() +
                    "; use one device per rank, or ask for 'native'",
                group_.ranks.rank);
  }
  take_turn(stream);
  return transport_.get();
}

void DevicePath::leave(Stream stream) noexcept {
  if (turn_) turn_->end(stream);
  turn_.reset();
  before_ = {};
}

// An operation that was begun when no rank had another group takes no turn: it could only meet the first operation of
// such a group, which makes its communicator meanwhile.
void DevicePath::take_turn(Stream stream) {
  const auto size = static_cast<size_t>(group_.ranks.size), rank = static_cast<size_t>(group_.ranks.rank);
  std::vector<uint8_t> has_others(size);
  has_others[rank] = member_->has_others() ? 1 : 0;
  group_.exchange(has_others.data(), sizeof has_others[0]);
  if (std::count(has_others.begin(), has_others.end(), 0) == group_.ranks.size) return;
  turn_.emplace(member_->turns(), group_.key, group_.ranks.group);
  std::vector<uint64_t> numbers(size);
  numbers[rank] = turn_->number();
  group_.exchange(numbers.data(), sizeof numbers[0]);
  turn_->agree(*std::max_element(numbers.begin(), numbers.end()));
  while (!turn_->has_come()) group_.pause("the turn of another group");
  before_ = turn_->begin(stream);
}

void DevicePath::choose(Stream stream) {
  const Device device = stream.device;
  std::vector<DeviceNote> notes(static_cast<size_t>(group_.ranks.size));
  DeviceNote& mine = notes[static_cast<size_t>(group_.ranks.rank)];
  mine.asked = asked_;
  std::string why_not;
  if (asked_ != DeviceChoice::kStaged) mine.version = source_->version(device, &why_not);
  copy_text(mine.device_id, device::runtime_of(device).device_id(device));
  copy_text(mine.bus_id, device::runtime_of(device).bus_id(device));
  const auto place = source_->place(mine.version);
  mine.host = place.host;
  mine.may_share = place.may_share;
  copy_text(mine.why_not, why_not);
  const uint32_t version = mine.version;
  group_.exchange(notes.data(), sizeof(DeviceNote));
  const DeviceDecision decision = decide_device_path(notes, *source_);
  if (decision.is_native) {
    member_.emplace(DeviceTurns::of(device));
    take_turn(stream);
    connect(device);
    describe(std::string(source_->name()) + " " + source_->version_name(version));
  } else {
    describe("staged: " + decision.why);
  }
  is_chosen_ = true;
}

// The key travels on the channels, whose other ends are authenticated.
void DevicePath::connect(Device device) {
  std::vector<DeviceTransportSource::Key> keys(static_cast<size_t>(group_.ranks.size));
  if (group_.ranks.rank == 0) keys[0] = source_->make_key();
  group_.exchange(keys.data(), sizeof keys[0]);
  transport_ = source_->connect(group_.ranks.rank, group_.ranks.size, keys[0], device, group_.pause);
}

std::string DevicePath::description() const {
  std::lock_guard lock(mutex_);
  return description_;
}

void DevicePath::describe(std::string text) {
  std::lock_guard lock(mutex_);
  description_ = std::move(text);
}

}  // namespace bagua

// DevicePath: how the collectives of a group move device memory: by a DeviceTransport, or staged through the host by
// the channels. The ranks agree at their first collective on a device, by what each of them has and asks for, and make
// the transport then: a group that never has one costs nothing.
//
// Used by the group's worker thread except where marked [any thread].
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/communicator/blame.h"
#include "csrc/communicator/device_turns.h"
#include "csrc/transport/device_transport.h"

namespace bagua {

// A user's choice. Wire values: append, never renumber.
enum class DeviceChoice : uint8_t {
  kAuto = 0,  // the transport where every rank has a device of its own and the library, staged otherwise
  kNative,    // an error where that is impossible
  kStaged,
};
// Returns the choice named "auto", "nccl" or "staged"; throws InvalidArgument.
DeviceChoice device_choice_from(const std::string& name);

// A rank's note to the others; it travels as it lies in memory.
struct DeviceNote {
  DeviceChoice asked = DeviceChoice::kAuto;
  bool may_share = false;  // and host: DeviceTransportSource::Place
  uint8_t padding[2] = {};
  uint32_t version = 0;  // of the library; 0: none that could be used
  uint64_t host = 0;
  char device_id[52] = {};
  char bus_id[32] = {};
  char why_not[412] = {};  // if there is none; all three end with a 0
};
static_assert(sizeof(DeviceNote) == 512);

// The decision by the notes of all ranks, which therefore come to the same. `why` says what kept them from the
// transport. Throws InvalidArgument where ranks ask for what cannot be, and names those that lack something.
struct DeviceDecision {
  bool is_native;
  std::string why;
};
DeviceDecision decide_device_path(const std::vector<DeviceNote>& notes, const DeviceTransportSource& source);

class DevicePath {
 public:
  // The parts of its group that it needs.
  struct Group {
    const GroupRanks& ranks;
    const std::string& key;  // Communicator::key
    // Every rank's note to every rank, in the place of its rank, by messages of the host in the running operation, so
    // that ranks that are in different ones find out.
    std::function<void(void* notes, size_t note_bytes)> exchange;
    DeviceTransport::Pause pause;
  };

  DevicePath(std::shared_ptr<DeviceTransportSource> source, DeviceChoice asked, Group group)
      : source_(std::move(source)), asked_(asked), group_(std::move(group)) {}

  // At the beginning of a collective in the order of `stream`. The transport for it, which all ranks are about to use
  // for the same operation; null: staged.
  DeviceTransport* enter(Stream stream);
  // At its end, however it ends.
  void leave(Stream stream) noexcept;
  // The end that the running operation stands behind on the device, of other groups, too.
  const DeviceTurns::Enqueued& before() const { return before_; }

  // Requires that there is one.
  DeviceTransport* transport() const { return transport_.get(); }
  const char* name() const { return source_->name(); }
  // "NCCL 2.27.3", or "staged: ..." and why; empty before the first collective. [any thread]
  std::string description() const;

 private:
  void choose(Stream stream);
  void take_turn(Stream stream);
  void connect(Device device);
  void describe(std::string text);

  const std::shared_ptr<DeviceTransportSource> source_;
  const DeviceChoice asked_;
  const Group group_;
  bool is_chosen_ = false;
  std::optional<DeviceTurns::Member> member_;  // where the transport is the choice
  std::optional<DeviceTurns::Turn> turn_;      // of the running operation
  DeviceTurns::Enqueued before_;               // its turn
  std::unique_ptr<DeviceTransport> transport_;
  mutable std::mutex mutex_;  // guards the next
  std::string description_;
};

}  // namespace bagua

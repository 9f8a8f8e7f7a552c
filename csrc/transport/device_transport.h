// DeviceTransport: what moves the device memory of a whole group by itself, where its ranks have devices that reach one
// another (nccl/). Beside it the group keeps its channels (transport.h), by which the ranks agree before anything is
// enqueued, and which stage device memory where there is no DeviceTransport.
//
// Everything is enqueued on the caller's stream, and the stream orders it: nothing here waits for the device. What has
// to wait for other ranks nevertheless (a connection that is made) calls `pause` between two looks; it throws when the
// operation is to end. For the group's worker thread, and once it is joined for who closes the group.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/common/deadline.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/operation.h"

namespace bagua {

// Part of a batch. Peers are the group's ranks.
struct DeviceMessage {
  bool is_send;
  int peer;
  void* data;  // a send only reads from it
  size_t bytes;
};

// A collective of the whole group; what the arguments are is in collectives.h. `numel` is of one rank's block.
struct NativeCollective {
  OperationKind kind;
  const void* input;
  void* output;
  size_t numel;
  DType dtype;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
};

class DeviceTransport {
 public:
  // A moment's sleep; `doing` is what is waited for. Throws Error when that is to end.
  using Pause = std::function<void(const char* doing)>;

  virtual ~DeviceTransport() = default;

  // Its memory and its streams, and no other device's.
  virtual Device device() const = 0;
  // Whether enqueue() takes a collective with this operator; of those that move bytes only, any operator.
  virtual bool has(OperationKind kind, DType dtype, ReduceOp op) const = 0;

  // Messages that move together, so that ranks which send and receive in one batch wait for no rank. Between two ranks
  // they are matched in their order.
  virtual void enqueue(const std::vector<DeviceMessage>& batch, Stream stream, const Pause& pause) = 0;
  virtual void enqueue(const NativeCollective& collective, Stream stream, const Pause& pause) = 0;

  // Throws what has gone wrong since, on this rank or another.
  virtual void check() = 0;
  // Ends what is enqueued, its memory undefined; nothing may be enqueued from here on. Does not wait for other ranks.
  virtual void abort() noexcept = 0;
  // The end where nothing went wrong and all that was enqueued is done; aborts what does not end in time.
  virtual void close(Deadline deadline) noexcept = 0;
};

// Makes DeviceTransports, where the host has what they need.
class DeviceTransportSource {
 public:
  // Made by one rank and passed to all.
  using Key = std::array<char, 128>;

  virtual ~DeviceTransportSource() = default;

  // "NCCL"
  virtual const char* name() const = 0;
  // Equal on ranks that can be connected. 0: this rank can't, and `why_not` is set.
  virtual uint32_t version(Device device, std::string* why_not) = 0;
  virtual std::string version_name(uint32_t version) const = 0;
  // The place of a rank in its view, by the settings of this process: ranks of one host need a device each, unless all
  // of them may share one.
  struct Place {
    uint64_t host = 0;
    bool may_share = false;
  };
  virtual Place place(uint32_t version) const = 0;
  virtual Key make_key() = 0;
  // Called by all ranks together.
  virtual std::unique_ptr<DeviceTransport> connect(int rank, int size, const Key& key, Device device,
                                                   const DeviceTransport::Pause& pause) = 0;
};

}  // namespace bagua

// NcclTransport: the device memory of a group over one NCCL communicator, and where it comes from.
//
// The communicator does not block: a call returns before its work is done, and who made it looks again until it is,
// between pauses that end with the operation's deadline. Its end is an abort unless all went well: a destroy may wait
// for ever for a peer that has died.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/transport/device_transport.h"
#include "csrc/transport/nccl/nccl_library.h"

namespace bagua::nccl {

class NcclTransport final : public DeviceTransport {
 public:
  // Makes the communicator, together with the other ranks.
  NcclTransport(std::shared_ptr<const NcclLibrary> library, int rank, int size, const UniqueId& id, Device device,
                const Pause& pause);
  ~NcclTransport() override { abort(); }

  Device device() const override { return device_; }
  bool has(OperationKind kind, DType dtype, ReduceOp op) const override;
  void enqueue(const std::vector<DeviceMessage>& batch, Stream stream, const Pause& pause) override;
  void enqueue(const NativeCollective& collective, Stream stream, const Pause& pause) override;
  void check() override;
  void abort() noexcept override;
  void close(Deadline deadline) noexcept override;

 private:
  // NCCL's calls leave the thread with the device that was its current one, and make a context there if it has none.
  template <typename Call>
  void on_device(const Call& call) const;
  std::pair<Result, const char*> begin(const NativeCollective& collective, Stream stream);
  void finalize(Deadline deadline);
  void settle(Result result, const char* call, const Pause& pause);
  [[noreturn]] void fail(Result result, const char* call) const;

  const std::shared_ptr<const NcclLibrary> library_;
  const Device device_;
  Communicator communicator_ = nullptr;  // null once it was aborted or destroyed
};

class NcclSource final : public DeviceTransportSource {
 public:
  // A source for devices of this kind. The library is opened when it is first asked for, `path` as NcclLibrary::open
  // has it.
  explicit NcclSource(DeviceKind kind = DeviceKind::kCuda, std::string path = "")
      : kind_(kind), path_(std::move(path)) {}

  const char* name() const override { return "NCCL"; }
  uint32_t version(Device device, std::string* why_not) override;
  std::string version_name(uint32_t version) const override { return nccl::version_name(static_cast<int>(version)); }
  Place place(uint32_t version) const override;
  Key make_key() override;
  std::unique_ptr<DeviceTransport> connect(int rank, int size, const Key& key, Device device,
                                           const DeviceTransport::Pause& pause) override;

 private:
  std::shared_ptr<const NcclLibrary> library();

  const DeviceKind kind_;
  const std::string path_;
  std::mutex mutex_;  // groups share a source; guards the next
  std::shared_ptr<const NcclLibrary> library_;
};

}  // namespace bagua::nccl

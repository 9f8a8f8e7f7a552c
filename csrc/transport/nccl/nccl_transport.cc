// Calls of NCCL, and the looks at what becomes of them; see nccl_transport.h.
#include "csrc/transport/nccl/nccl_transport.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <unistd.h>

#include "csrc/common/error.h"
#include "csrc/device/runtime.h"

namespace bagua::nccl {
namespace {

// How often the end of a communicator is looked at, where no operation's pause serves.
constexpr std::chrono::microseconds kClosePoll{100};

std::optional<DataType> data_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return kFloat32;
    case DType::kF64: return kFloat64;
    case DType::kF16: return kFloat16;
    case DType::kBF16: return kBfloat16;
    case DType::kI8: return kInt8;
    case DType::kU8: return kUint8;
    case DType::kI32: return kInt32;
    case DType::kI64: return kInt64;
    case DType::kBool: return std::nullopt;
  }
  return std::nullopt;
}

std::optional<RedOp> operator_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return kSum;
    case ReduceOp::kAvg: return kAvg;
    case ReduceOp::kProduct: return kProd;
    case ReduceOp::kMin: return kMin;
    case ReduceOp::kMax: return kMax;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: return std::nullopt;
  }
  return std::nullopt;
}

// Its MIN and MAX are those of C, which drop a NaN; ours keep it.
bool loses_nan(DType dtype, ReduceOp op) {
  return is_floating(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax);
}

ErrorKind error_kind(Result result) {
  switch (result) {
    case kUnhandledCudaError: return ErrorKind::kDevice;
    case kSystemError:
    case kRemoteError: return ErrorKind::kTransport;
    default: return ErrorKind::kInternal;
  }
}

// The text by which NCCL tells hosts apart: containers with names of their own are hosts.
std::string host_text() {
  if (const char* const told = std::getenv("NCCL_HOSTID")) return told;
  char name[256] = {};
  (void)gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return name + boot;
}

}  // namespace

NcclTransport::NcclTransport(std::shared_ptr<const NcclLibrary> library, int rank, int size, const UniqueId& id,
                             Device device, const Pause& pause)
    : library_(std::move(library)), device_(device) {
  Config config;
  config.blocking = 0;
  try {
    on_device([&] {
      settle(library_->CommInitRankConfig(&communicator_, size, id, rank, &config), "ncclCommInitRankConfig", pause);
    });
  } catch (...) {
    abort();
    throw;
  }
}

template <typename Call>
void NcclTransport::on_device(const Call& call) const {
  device::runtime_of(device_).call_on(device_, std::cref(call));
}

bool NcclTransport::has(OperationKind kind, DType dtype, ReduceOp op) const {
  switch (kind) {
    case OperationKind::kAllReduce:
    case OperationKind::kReduce:
    case OperationKind::kReduceScatter: return data_type(dtype) && operator_of(op) && !loses_nan(dtype, op);
    case OperationKind::kAllGather:
    case OperationKind::kBroadcast: return data_type(dtype).has_value();
    default: return false;
  }
}

// The group ends even if a call fails: what the thread calls next must not become part of it.
void NcclTransport::enqueue(const std::vector<DeviceMessage>& batch, Stream stream, const Pause& pause) {
  on_device([&] {
    settle(library_->GroupStart(), "ncclGroupStart", pause);
    Result result = kSuccess;
    for (size_t i = 0; i < batch.size() && (result == kSuccess || result == kInProgress); ++i) {
      const auto& [is_send, peer, data, bytes] = batch[i];
      result = is_send ? library_->Send(data, bytes, kUint8, peer, communicator_, stream.handle)
                       : library_->Recv(data, bytes, kUint8, peer, communicator_, stream.handle);
    }
    const Result ended = library_->GroupEnd();
    if (result == kSuccess || result == kInProgress) result = ended;
    settle(result, "ncclSend and ncclRecv", pause);
  });
}

void NcclTransport::enqueue(const NativeCollective& collective, Stream stream, const Pause& pause) {
  on_device([&] {
    const auto [result, call] = begin(collective, stream);
    settle(result, call, pause);
  });
}

// The result so far, and the name of the function. has() has said that NCCL knows type and operator.
std::pair<Result, const char*> NcclTransport::begin(const NativeCollective& c, Stream stream) {
  const DataType type = *data_type(c.dtype);
  const auto op = [&] { return *operator_of(c.op); };
  switch (c.kind) {
    case OperationKind::kAllReduce:
      return {library_->AllReduce(c.input, c.output, c.numel, type, op(), communicator_, stream.handle),
              "ncclAllReduce"};
    case OperationKind::kReduce:
      return {library_->Reduce(c.input, c.output, c.numel, type, op(), c.root, communicator_, stream.handle),
              "ncclReduce"};
    case OperationKind::kReduceScatter:
      return {library_->ReduceScatter(c.input, c.output, c.numel, type, op(), communicator_, stream.handle),
              "ncclReduceScatter"};
    case OperationKind::kAllGather:
      return {library_->AllGather(c.input, c.output, c.numel, type, communicator_, stream.handle), "ncclAllGather"};
    case OperationKind::kBroadcast:
      return {library_->Broadcast(c.input, c.output, c.numel, type, c.root, communicator_, stream.handle),
              "ncclBroadcast"};
    default: throw Error(ErrorKind::kInternal, "NCCL has no " + std::string(operation_name(c.kind)));
  }
}

// Until the call has done its work, or failed.
void NcclTransport::settle(Result result, const char* call, const Pause& pause) {
  while (result == kInProgress) {
    pause(call);
    const Result looked = library_->CommGetAsyncError(communicator_, &result);
    if (looked != kSuccess) fail(looked, "ncclCommGetAsyncError");
  }
  if (result != kSuccess) fail(result, call);
}

void NcclTransport::fail(Result result, const char* call) const {
  const char* const detail = library_->GetLastError(communicator_);
  std::string message = std::string("NCCL ") + version_name(library_->version()) + " on " + device_name(device_) +
                        " reports from " + call + ": " + library_->GetErrorString(result);
  if (detail != nullptr && *detail != '\0') message += std::string(" (") + detail + ")";
  throw Error(error_kind(result), message + "; NCCL_DEBUG=WARN shows more");
}

void NcclTransport::check() {
  if (communicator_ == nullptr) return;
  Result result = kSuccess;
  const Result looked = library_->CommGetAsyncError(communicator_, &result);
  if (looked != kSuccess) fail(looked, "ncclCommGetAsyncError");
  if (result != kSuccess && result != kInProgress) fail(result, "what was enqueued");
}

void NcclTransport::abort() noexcept {
  if (communicator_ == nullptr) return;
  const Communicator aborted = std::exchange(communicator_, nullptr);
  try {
    on_device([&] { library_->CommAbort(aborted); });
  } catch (const Error&) {  // a device that is lost
    library_->CommAbort(aborted);
  }
}

void NcclTransport::close(Deadline deadline) noexcept {
  if (communicator_ == nullptr) return;
  try {
    on_device([&] { finalize(deadline); });
  } catch (const Error&) {  // a device that is lost
  }
  abort();
}

void NcclTransport::finalize(Deadline deadline) {
  Result result = library_->CommFinalize(communicator_);
  while (result == kInProgress && !deadline.expired()) {
    std::this_thread::sleep_for(kClosePoll);
    if (library_->CommGetAsyncError(communicator_, &result) != kSuccess) return;
  }
  if (result == kSuccess) library_->CommDestroy(std::exchange(communicator_, nullptr));
}

std::shared_ptr<const NcclLibrary> NcclSource::library() {
  std::lock_guard lock(mutex_);
  if (library_ == nullptr) library_ = NcclLibrary::open(path_);
  return library_;
}

// Two of NCCL's own settings let ranks share a device, or the parts of one: from 2.30 on one that allows it, and
// before, names of hosts that differ, between which it goes by the network.
DeviceTransportSource::Place NcclSource::place(uint32_t version) const {
  constexpr uint32_t kFirstToShare = 23000;
  const char* const shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return {std::hash<std::string>{}(host_text()) | 1,
          version >= kFirstToShare && shares != nullptr && std::string_view(shares) == "1"};
}

uint32_t NcclSource::version(Device device, std::string* why_not) {
  if (device.kind != kind_) {
    *why_not = std::string("NCCL moves memory of ") + device_kind_name(kind_) + " devices only";
    return 0;
  }
  try {
    return static_cast<uint32_t>(library()->version());
  } catch (const Error& error) {
    *why_not = error.what();
    return 0;
  }
}

DeviceTransportSource::Key NcclSource::make_key() {
  UniqueId id;
  const auto opened = library();
  const Result result = opened->GetUniqueId(&id);
  if (result != kSuccess) {
    throw Error(error_kind(result), std::string("NCCL reports from ncclGetUniqueId: ") +
                                        opened->GetErrorString(result) + "; NCCL_DEBUG=WARN shows more");
  }
  Key key;
  static_assert(sizeof key == sizeof id);
  std::memcpy(key.data(), &id, sizeof id);
  return key;
}

std::unique_ptr<DeviceTransport> NcclSource::connect(int rank, int size, const Key& key, Device device,
                                                     const DeviceTransport::Pause& pause) {
  UniqueId id;
  std::memcpy(&id, key.data(), sizeof id);
  return std::make_unique<NcclTransport>(library(), rank, size, id, device, pause);
}

}  // namespace bagua::nccl

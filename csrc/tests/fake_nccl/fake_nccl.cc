// The fake libnccl; see fake_nccl.h.
//
// Every pair of a communicator's ranks has a socket. A batch (a group of sends and receives, or one collective) is a
// command of its stream: it waits for the communicator's earlier ones, moves all of its messages together, and compares
// what the other end says it sends. A collective is an exchange of inputs, and then the sum in the order of the ranks,
// halves in f32. A call that NCCL may leave unfinished is left so until its state has been asked for twice.
#include "csrc/tests/fake_nccl/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "csrc/kernels/cpu/half.h"
#include "csrc/transport/nccl/nccl_abi.h"

#define FAKE_NCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace bagua;
using namespace bagua::nccl;
using bagua::nccl::Communicator;

constexpr int kDefaultVersion = version_code(2, 27, 3);

struct State {
  std::mutex mutex;  // guards the rest
  int version = kDefaultVersion;
  std::map<int, Result> init_errors, async_errors;  // by rank
  std::set<int> hanging;
  std::vector<std::pair<int, std::string>> calls;
  std::string violations;
  std::string text;  // that was asked for last
  std::set<void*> live;
  uint64_t num_ids = 0;
};

State& state() {
  static State* const made = new State;  // streams may outlive static objects
  return *made;
}

const FakeNcclDevice* device = nullptr;

void record(int rank, std::string call) {
  std::lock_guard lock(state().mutex);
  state().calls.emplace_back(rank, std::move(call));
}

void violate(const std::string& what) {
  std::lock_guard lock(state().mutex);
  state().violations += what + "\n";
}

size_t item_bytes_of(DataType type) {
  switch (type) {
    case kInt8:
    case kUint8: return 1;
    case kFloat16:
    case kBfloat16: return 2;
    case kInt32:
    case kFloat32: return 4;
    case kInt64:
    case kFloat64: return 8;
  }
  return 0;
}

enum class Kind : uint32_t { kSend, kRecv, kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce };
constexpr const char* kKindNames[] = {"send",       "recv",      "all_reduce", "reduce_scatter",
                                      "all_gather", "broadcast", "reduce"};

struct Call {
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  DataType type = kUint8;
  RedOp op = RedOp::kSum;
  int peer = -1;  // or the root

  size_t bytes() const { return count * item_bytes_of(type); }
  std::string text() const {
    std::string text = kKindNames[static_cast<int>(kind)];
    if (peer >= 0) text += " " + std::to_string(peer);
    return text + " " + std::to_string(count);
  }
};

// In front of every message.
struct Header {
  uint32_t kind;
  uint32_t type;
  uint32_t op;
  int32_t root;
  uint64_t count;
};

struct Impl {
  int rank = 0, size = 0, device_index = 0;
  std::vector<int> sockets;  // by rank
  std::thread init;
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{nccl::kSuccess};
  std::atomic<bool> is_busy{true};  // connecting, or a call is not finished
  std::atomic<uint64_t> num_enqueued{0}, num_done{0};
  std::mutex mutex;  // guards the rest
  std::string last_error;
  std::function<Result()> unfinished;  // what a call has left to be done, after so many looks
  int looks = 0;

  ~Impl() {
    if (init.joinable()) init.join();
    for (const int fd : sockets) {
      if (fd >= 0) ::close(fd);
    }
  }

  void fail(Result failure, const std::string& why) {
    {
      std::lock_guard lock(mutex);
      if (last_error.empty()) last_error = why;
    }
    int healthy = nccl::kSuccess;
    error.compare_exchange_strong(healthy, failure);
  }

  Result result() const {
    if (error != nccl::kSuccess) return static_cast<Result>(error.load());
    return is_busy ? kInProgress : nccl::kSuccess;
  }
  void leave_unfinished(std::function<Result()> rest) {
    unfinished = std::move(rest);
    looks = 0;
    is_busy = true;
  }
};

using Shared = std::shared_ptr<Impl>;

// The state behind a communicator; null, and a violation, where it does not live.
Shared impl_of(Communicator communicator, const char* call, bool makes_contexts = true) {
  Shared found;
  {
    std::lock_guard lock(state().mutex);
    if (state().live.count(communicator) != 0) found = *reinterpret_cast<Shared*>(communicator);
  }
  if (found != nullptr) {
    // NCCL would make a context on the device that the thread comes back to.
    if (makes_contexts && device->current_device() != found->device_index) {
      violate(std::string(call) + " while another device is the thread's current one");
    }
    return found;
  }
  violate(std::string(call) + " of a communicator that was aborted or destroyed");
  return nullptr;
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

// ---- connections

sockaddr_un address_of(const UniqueId& id, int rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // abstract: begins with a 0 and leaves nothing behind
  const int count = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%s.%d", id.internal, rank);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(count));
  return address;
}

// Dials the lower ranks and accepts the higher ones.
void connect_all(Impl& c, const UniqueId& id) {
  socklen_t length = 0;
  const sockaddr_un own = address_of(id, c.rank, &length);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&own), length) != 0 || listen(listener, c.size) != 0) {
    ::close(listener);
    return c.fail(kInvalidUsage, "rank " + std::to_string(c.rank) + " is there twice");
  }
  for (int peer = 0; peer < c.rank && !c.is_aborted;) {
    const sockaddr_un theirs = address_of(id, peer, &length);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&theirs), length) != 0 ||
        write(fd, &c.rank, sizeof c.rank) != sizeof c.rank) {
      ::close(fd);
      pause();
      continue;
    }
    c.sockets[static_cast<size_t>(peer++)] = fd;
  }
  for (int missing = c.size - 1 - c.rank; missing > 0 && !c.is_aborted;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {
      pause();
      continue;
    }
    int peer = -1;
    if (read(fd, &peer, sizeof peer) == sizeof peer && peer > c.rank && peer < c.size) {
      c.sockets[static_cast<size_t>(peer)] = fd;
      --missing;
    } else {
      ::close(fd);
    }
  }
  ::close(listener);
  c.is_busy = false;
}

// ---- messages that move together

struct Message {
  Call call;
  int peer;
  bool is_send;
  uint8_t* data;
  size_t bytes;
  Header header{};
  size_t done = 0;  // bytes of the header, then of the data

  size_t total() const { return sizeof header + bytes; }
};

Header header_of(const Call& call) {
  const bool reduces = call.kind == Kind::kAllReduce || call.kind == Kind::kReduceScatter || call.kind == Kind::kReduce;
  const bool is_rooted = call.kind == Kind::kBroadcast || call.kind == Kind::kReduce;
  // A receive expects what a send says.
  const Kind kind = call.kind == Kind::kRecv ? Kind::kSend : call.kind;
  return {static_cast<uint32_t>(kind), static_cast<uint32_t>(call.type), reduces ? static_cast<uint32_t>(call.op) : 0,
          is_rooted ? call.peer : -1, call.count};
}

// True if something moved.
bool advance(Impl& c, Message& m) {
  const int fd = c.sockets[static_cast<size_t>(m.peer)];
  const bool in_header = m.done < sizeof m.header;
  uint8_t* const at = in_header ? reinterpret_cast<uint8_t*>(&m.header) + m.done : m.data + (m.done - sizeof m.header);
  const size_t left = in_header ? sizeof m.header - m.done : m.total() - m.done;
  const ssize_t count =
      m.is_send ? ::send(fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL) : ::recv(fd, at, left, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count <= 0) {
    c.fail(kRemoteError, "the connection to rank " + std::to_string(m.peer) + " is closed");
    return false;
  }
  m.done += static_cast<size_t>(count);
  if (m.is_send || m.done != sizeof m.header || !in_header) return true;
  const Header expected = header_of(m.call);
  if (std::memcmp(&m.header, &expected, sizeof expected) != 0) {
    const std::string what = "rank " + std::to_string(c.rank) + " is in " + m.call.text() + ", rank " +
                             std::to_string(m.peer) + " in " + kKindNames[m.header.kind % 7] + " of " +
                             std::to_string(m.header.count) + " of type " + std::to_string(m.header.type);
    violate("mismatch: " + what);
    c.fail(kInternalError, what);
  }
  return true;
}

bool goes_on(const Impl& c) { return !c.is_aborted && c.error == nccl::kSuccess; }

// Per peer and direction in their order, everything else at once. False if it came to an end without being done.
bool exchange(Impl& c, std::vector<Message>& messages) {
  for (;;) {
    bool all_done = true, moved = false;
    std::set<std::pair<int, bool>> busy;
    for (Message& m : messages) {
      if (m.done == m.total() || !busy.emplace(m.peer, m.is_send).second) continue;
      while (goes_on(c) && m.done < m.total() && advance(c, m)) moved = true;
      all_done = all_done && m.done == m.total();
      if (m.done == m.total()) busy.erase({m.peer, m.is_send});
    }
    if (all_done && goes_on(c)) return true;
    if (!goes_on(c)) return false;
    if (!moved) pause();
  }
}

// ---- sums

template <typename T, typename Sum>
void fold(RedOp op, const std::vector<const uint8_t*>& inputs, uint8_t* output, size_t count, float (*load)(T),
          T (*store)(float)) {
  for (size_t i = 0; i < count; ++i) {
    Sum total{};
    for (size_t r = 0; r < inputs.size(); ++r) {
      T raw;
      std::memcpy(&raw, inputs[r] + i * sizeof(T), sizeof(T));
      const Sum value = load != nullptr ? static_cast<Sum>(load(raw)) : static_cast<Sum>(raw);
      if (r == 0) {
        total = value;
      } else if (op == RedOp::kSum || op == RedOp::kAvg) {
        total = static_cast<Sum>(total + value);
      } else if (op == RedOp::kProd) {
        total = static_cast<Sum>(total * value);
      } else if (op == RedOp::kMax) {
        total = std::max(total, value);
      } else {
        total = std::min(total, value);
      }
    }
    if (op == RedOp::kAvg) total = static_cast<Sum>(total / static_cast<Sum>(inputs.size()));
    const T result = store != nullptr ? store(static_cast<float>(total)) : static_cast<T>(total);
    std::memcpy(output + i * sizeof(T), &result, sizeof(T));
  }
}

template <typename T, typename Sum = T>
void fold_plain(RedOp op, const std::vector<const uint8_t*>& inputs, uint8_t* output, size_t count) {
  fold<T, Sum>(op, inputs, output, count, nullptr, nullptr);
}

void reduce(DataType type, RedOp op, const std::vector<const uint8_t*>& inputs, uint8_t* output, size_t count) {
  switch (type) {
    case kInt8: return fold_plain<int8_t>(op, inputs, output, count);
    case kUint8: return fold_plain<uint8_t>(op, inputs, output, count);
    case kInt32: return fold_plain<uint32_t, int32_t>(op, inputs, output, count);
    case kInt64: return fold_plain<uint64_t, int64_t>(op, inputs, output, count);
    case kFloat32: return fold_plain<float>(op, inputs, output, count);
    case kFloat64: return fold_plain<double>(op, inputs, output, count);
    case kFloat16: return fold<uint16_t, float>(op, inputs, output, count, &kernels::f16_to_f32, &kernels::f32_to_f16);
    case kBfloat16:
      return fold<uint16_t, float>(op, inputs, output, count, &kernels::bf16_to_f32, &kernels::f32_to_bf16);
  }
}

// ---- what a stream executes

struct Batch {
  Shared communicator;
  std::vector<Call> calls;
  uint64_t ticket = 0;
  bool hangs = false;
};

uint8_t* memory(Impl& c, const void* address, size_t bytes) {
  if (bytes == 0) return nullptr;
  void* const there = device->host_address(address);
  if (there == nullptr) {
    violate("memory that is not of device " + std::to_string(c.device_index));
    c.fail(kUnhandledCudaError, "an address is not of the communicator's device");
  }
  return static_cast<uint8_t*>(there);
}

void execute_messages(Impl& c, const std::vector<Call>& calls) {
  std::vector<Message> messages;
  for (const Call& call : calls) {
    const bool is_send = call.kind == Kind::kSend;
    uint8_t* const data = memory(c, is_send ? call.input : call.output, call.bytes());
    messages.push_back({call, call.peer, is_send, data, call.bytes(), is_send ? header_of(call) : Header{}, 0});
  }
  if (goes_on(c)) exchange(c, messages);
}

void execute_collective(Impl& c, const Call& call) {
  const auto size = static_cast<size_t>(c.size), own = static_cast<size_t>(c.rank);
  const size_t bytes = call.bytes();
  const bool scatters = call.kind == Kind::kReduceScatter, gathers = call.kind == Kind::kAllGather;
  const bool is_root = c.rank == call.peer;
  const auto sends_to = [&](size_t peer) {
    if (call.kind == Kind::kBroadcast) return is_root;
    return call.kind != Kind::kReduce || static_cast<int>(peer) == call.peer;
  };
  const auto receives_from = [&](size_t peer) {
    if (call.kind == Kind::kBroadcast) return static_cast<int>(peer) == call.peer;
    return call.kind != Kind::kReduce || is_root;
  };
  uint8_t* const input = memory(c, call.input, scatters ? bytes * size : bytes);
  const bool has_output = call.kind != Kind::kReduce || is_root;
  uint8_t* const output = has_output ? memory(c, call.output, gathers ? bytes * size : bytes) : nullptr;
  if (!goes_on(c)) return;
  // The own part apart too: the output may be the input.
  std::vector<std::vector<uint8_t>> received(size, std::vector<uint8_t>(bytes));
  std::vector<Message> messages;
  for (size_t peer = 0; peer < size; ++peer) {
    uint8_t* const part = input + (scatters ? peer * bytes : 0);
    if (peer == own) {
      if (bytes > 0) std::memcpy(received[own].data(), part, bytes);
      continue;
    }
    const int rank = static_cast<int>(peer);
    if (sends_to(peer)) messages.push_back({call, rank, true, part, bytes, header_of(call), 0});
    if (receives_from(peer)) messages.push_back({call, rank, false, received[peer].data(), bytes, Header{}, 0});
  }
  if (!exchange(c, messages) || bytes == 0 || !has_output) return;
  if (gathers) {
    for (size_t peer = 0; peer < size; ++peer) std::memcpy(output + peer * bytes, received[peer].data(), bytes);
  } else if (call.kind == Kind::kBroadcast) {
    std::memcpy(output, received[static_cast<size_t>(call.peer)].data(), bytes);
  } else {
    std::vector<const uint8_t*> inputs;
    for (const auto& one : received) inputs.push_back(one.data());
    reduce(call.type, call.op, inputs, output, call.count);
  }
}

void execute(void* argument) {
  const std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
  Impl& c = *batch->communicator;
  while (!c.is_aborted && c.num_done != batch->ticket) pause();
  while (!c.is_aborted && batch->hangs) pause();
  if (goes_on(c)) {
    if (batch->calls[0].kind == Kind::kSend || batch->calls[0].kind == Kind::kRecv) {
      execute_messages(c, batch->calls);
    } else {
      execute_collective(c, batch->calls[0]);
    }
  }
  // Work that has failed stays on the device until it is aborted.
  while (!c.is_aborted && !goes_on(c)) pause();
  ++c.num_done;
}

// ---- calls

Result refuse(const std::string& what) {
  violate(what);
  return kInvalidUsage;
}

struct Pending {
  Shared communicator;
  StreamHandle stream;
  std::vector<Call> calls;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> group;

// Leaves the launch undone, as NCCL may, until the state has been asked for twice.
Result launch(const Pending& pending) {
  Impl& c = *pending.communicator;
  const bool is_group = pending.calls[0].kind == Kind::kSend || pending.calls[0].kind == Kind::kRecv;
  std::string text;
  for (const Call& call : pending.calls) text += (text.empty() ? "" : ", ") + call.text();
  record(c.rank, is_group ? "group{" + text + "}" : text);
  std::lock_guard lock(c.mutex);
  if (c.unfinished) return refuse("a launch while another one of the communicator is not finished");
  c.leave_unfinished([pending] {
    Impl& mine = *pending.communicator;
    bool hangs;
    {
      std::lock_guard guard(state().mutex);
      hangs = state().hanging.count(mine.rank) != 0;
    }
    auto* const batch = new Batch{pending.communicator, pending.calls, mine.num_enqueued++, hangs};
    const char* const name = kKindNames[static_cast<int>(batch->calls[0].kind)];
    if (device->enqueue(mine.device_index, pending.stream, (std::string("nccl_") + name).c_str(), execute, batch)) {
      return nccl::kSuccess;
    }
    delete batch;
    violate("a stream that is not of device " + std::to_string(mine.device_index));
    return kUnhandledCudaError;
  });
  return kInProgress;
}

Result enqueue(const char* name, Call call, Communicator communicator, StreamHandle stream) {
  const Shared c = impl_of(communicator, name);
  if (c == nullptr) return nccl::kInvalidArgument;
  const Result ready = c->result();
  if (ready == kInProgress) return refuse(std::string(name) + " while the communicator is not ready");
  if (ready != nccl::kSuccess) return ready;  // which may have come since the caller has looked
  if (call.peer >= c->size) return refuse(std::string(name) + " of rank " + std::to_string(call.peer));
  if (call.peer == c->rank && (call.kind == Kind::kSend || call.kind == Kind::kRecv)) {
    return refuse(std::string(name) + " to and from the own rank");
  }
  if (group_depth == 0) return launch({c, stream, {call}});
  for (Pending& pending : group) {
    if (pending.communicator != c || pending.stream != stream) continue;
    const bool is_message = call.kind == Kind::kSend || call.kind == Kind::kRecv;
    if (!is_message) return refuse("a collective in a group");
    pending.calls.push_back(call);
    return nccl::kSuccess;
  }
  group.push_back({c, stream, {call}});
  return nccl::kSuccess;
}

}  // namespace

FAKE_NCCL_EXPORT Result ncclGetVersion(int* version) {
  std::lock_guard lock(state().mutex);
  *version = state().version;
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT Result ncclGetUniqueId(UniqueId* id) {
  std::memset(id, 0, sizeof *id);
  {
    std::lock_guard lock(state().mutex);
    std::snprintf(id->internal, sizeof id->internal, "fake-nccl.%d.%llu", static_cast<int>(getpid()),
                  static_cast<unsigned long long>(++state().num_ids));
  }
  record(0, "unique_id");
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommInitRankConfig(Communicator* made, int size, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->version < kMinVersion) {
    return refuse("a configuration that NCCL does not know");
  }
  if (config->blocking != 0) return refuse("a communicator that blocks");
  if (device == nullptr) return refuse("fake_nccl_use_device was not called");
  record(rank, "init");
  auto c = std::make_shared<Impl>();
  c->rank = rank;
  c->size = size;
  c->device_index = device->current_device();
  c->sockets.assign(static_cast<size_t>(size), -1);
  auto* const handle = new Shared(c);
  *made = reinterpret_cast<Communicator>(handle);
  Result error = nccl::kSuccess;
  {
    std::lock_guard lock(state().mutex);
    state().live.insert(handle);
    const auto told = state().init_errors.find(rank);
    if (told != state().init_errors.end()) error = told->second;
  }
  if (error != nccl::kSuccess) {
    c->fail(error, "told to fail");
  } else {
    c->init = std::thread([impl = c.get(), id] { connect_all(*impl, id); });
  }
  return kInProgress;
}

FAKE_NCCL_EXPORT Result ncclCommGetAsyncError(Communicator communicator, Result* error) {
  const Shared c = impl_of(communicator, "ncclCommGetAsyncError", false);
  if (c == nullptr) return nccl::kInvalidArgument;
  Result told = nccl::kSuccess;
  {
    std::lock_guard lock(state().mutex);
    const auto found = state().async_errors.find(c->rank);
    if (found != state().async_errors.end()) told = found->second;
  }
  if (told != nccl::kSuccess) c->fail(told, "told to fail");
  std::lock_guard lock(c->mutex);
  if (c->unfinished && ++c->looks == 2) {
    const Result finished = std::exchange(c->unfinished, nullptr)();
    if (finished != nccl::kSuccess) c->error = finished;
    c->is_busy = false;
  }
  *error = c->result();
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kUnhandledCudaError: return "unhandled cuda error";
    case kSystemError: return "unhandled system error";
    case kInternalError: return "internal error";
    case nccl::kInvalidArgument: return "invalid argument";
    case kInvalidUsage: return "invalid usage";
    case kRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}

FAKE_NCCL_EXPORT const char* ncclGetLastError(Communicator communicator) {
  static thread_local std::string text;
  if (communicator == nullptr) return "";
  const Shared c = impl_of(communicator, "ncclGetLastError", false);
  if (c == nullptr) return "";
  std::lock_guard lock(c->mutex);
  text = c->last_error;
  return text.c_str();
}

namespace {

void drop(Communicator communicator) {
  auto* const handle = reinterpret_cast<Shared*>(communicator);
  {
    std::lock_guard lock(state().mutex);
    state().live.erase(handle);
  }
  std::lock_guard lock((*handle)->mutex);
  (*handle)->unfinished = nullptr;
}

}  // namespace

FAKE_NCCL_EXPORT Result ncclCommFinalize(Communicator communicator) {
  const Shared c = impl_of(communicator, "ncclCommFinalize");
  if (c == nullptr) return nccl::kInvalidArgument;
  record(c->rank, "finalize");
  if (c->num_done != c->num_enqueued) violate("finalize while work is on the device");
  std::lock_guard lock(c->mutex);
  c->leave_unfinished([] { return nccl::kSuccess; });
  return kInProgress;
}

FAKE_NCCL_EXPORT Result ncclCommDestroy(Communicator communicator) {
  const Shared c = impl_of(communicator, "ncclCommDestroy");
  if (c == nullptr) return nccl::kInvalidArgument;
  record(c->rank, "destroy");
  if (c->result() != nccl::kSuccess) violate("destroy of a communicator that has failed or is not finalized");
  drop(communicator);
  delete reinterpret_cast<Shared*>(communicator);
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT Result ncclCommAbort(Communicator communicator) {
  const Shared c = impl_of(communicator, "ncclCommAbort");
  if (c == nullptr) return nccl::kInvalidArgument;
  record(c->rank, "abort");
  c->is_aborted = true;
  if (c->init.joinable()) c->init.join();
  // The part that peers wait for will not come. The last user closes it.
  for (const int fd : c->sockets) {
    if (fd >= 0) shutdown(fd, SHUT_RDWR);
  }
  drop(communicator);
  delete reinterpret_cast<Shared*>(communicator);
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT Result ncclGroupStart() {
  ++group_depth;
  return nccl::kSuccess;
}

FAKE_NCCL_EXPORT Result ncclGroupEnd() {
  if (group_depth == 0) return refuse("ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return nccl::kSuccess;
  Result result = nccl::kSuccess;
  for (const Pending& pending : std::exchange(group, {})) {
    const Result launched = launch(pending);
    if (result == nccl::kSuccess || result == kInProgress) result = launched;
  }
  return result;
}

FAKE_NCCL_EXPORT Result ncclSend(const void* data, size_t count, DataType type, int peer, Communicator communicator,
                                 StreamHandle stream) {
  return enqueue("ncclSend", {Kind::kSend, data, nullptr, count, type, RedOp::kSum, peer}, communicator, stream);
}

FAKE_NCCL_EXPORT Result ncclRecv(void* data, size_t count, DataType type, int peer, Communicator communicator,
                                 StreamHandle stream) {
  return enqueue("ncclRecv", {Kind::kRecv, nullptr, data, count, type, RedOp::kSum, peer}, communicator, stream);
}

FAKE_NCCL_EXPORT Result ncclAllReduce(const void* input, void* output, size_t count, DataType type, RedOp op,
                                      Communicator communicator, StreamHandle stream) {
  return enqueue("ncclAllReduce", {Kind::kAllReduce, input, output, count, type, op}, communicator, stream);
}

FAKE_NCCL_EXPORT Result ncclReduceScatter(const void* input, void* output, size_t count, DataType type, RedOp op,
                                          Communicator communicator, StreamHandle stream) {
  return enqueue("ncclReduceScatter", {Kind::kReduceScatter, input, output, count, type, op}, communicator, stream);
}

FAKE_NCCL_EXPORT Result ncclAllGather(const void* input, void* output, size_t count, DataType type,
                                      Communicator communicator, StreamHandle stream) {
  return enqueue("ncclAllGather", {Kind::kAllGather, input, output, count, type}, communicator, stream);
}

FAKE_NCCL_EXPORT Result ncclBroadcast(const void* input, void* output, size_t count, DataType type, int root,
                                      Communicator communicator, StreamHandle stream) {
  return enqueue("ncclBroadcast", {Kind::kBroadcast, input, output, count, type, RedOp::kSum, root}, communicator,
                 stream);
}

FAKE_NCCL_EXPORT Result ncclReduce(const void* input, void* output, size_t count, DataType type, RedOp op, int root,
                                   Communicator communicator, StreamHandle stream) {
  return enqueue("ncclReduce", {Kind::kReduce, input, output, count, type, op, root}, communicator, stream);
}

// ---- for the tests

FAKE_NCCL_EXPORT void fake_nccl_use_device(const FakeNcclDevice* used) { device = used; }

FAKE_NCCL_EXPORT void fake_nccl_reset() {
  std::lock_guard lock(state().mutex);
  state().version = kDefaultVersion;
  state().init_errors.clear();
  state().async_errors.clear();
  state().hanging.clear();
  state().calls.clear();
  state().violations.clear();
}

FAKE_NCCL_EXPORT void fake_nccl_set_version(int version) {
  std::lock_guard lock(state().mutex);
  state().version = version;
}

FAKE_NCCL_EXPORT void fake_nccl_fail_init(int rank, int result) {
  std::lock_guard lock(state().mutex);
  state().init_errors[rank] = static_cast<Result>(result);
}

FAKE_NCCL_EXPORT void fake_nccl_fail_async(int rank, int result) {
  std::lock_guard lock(state().mutex);
  state().async_errors[rank] = static_cast<Result>(result);
}

FAKE_NCCL_EXPORT void fake_nccl_hang(int rank) {
  std::lock_guard lock(state().mutex);
  state().hanging.insert(rank);
}

FAKE_NCCL_EXPORT const char* fake_nccl_calls(int rank) {
  std::lock_guard lock(state().mutex);
  state().text.clear();
  for (const auto& [who, call] : state().calls) {
    if (rank < 0 || who == rank) state().text += call + "\n";
  }
  return state().text.c_str();
}

FAKE_NCCL_EXPORT const char* fake_nccl_violations() {
  std::lock_guard lock(state().mutex);
  state().text = state().violations;
  return state().text.c_str();
}

FAKE_NCCL_EXPORT int fake_nccl_num_communicators() {
  std::lock_guard lock(state().mutex);
  return static_cast<int>(state().live.size());
}

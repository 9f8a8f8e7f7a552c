// The contract between the collectives and whatever moves their bytes.
//
// A Channel carries messages to and from one peer of one group. Messages of one direction arrive in the
// order in which they were posted, and both ends know every size beforehand: a receive is posted with
// its exact size into its final memory. Channels never block; Mesh (mesh.h) waits. Only the group's
// worker thread posts and makes progress; a channel may complete requests from a thread of its own.
//
// Every message is stamped with the Operation it belongs to, and the receiver compares the stamp with its
// own: two ranks that call different collectives get an error that shows both sides.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/common/dtype.h"
#include "csrc/common/stream.h"

namespace bagua {

enum class OperationKind : uint8_t {
  kNone = 0,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kPointToPoint,
  kNeighborAverage,
  kDifferenceRingAverage,
};

std::string_view operation_name(OperationKind kind);

// What a rank believes it is doing; 24 bytes on the wire in front of every message.
struct Operation {
  uint32_t sequence = 0;  // counts the collectives of the group; 0 for point-to-point
  OperationKind kind = OperationKind::kNone;
  ReduceOp reduce_op = ReduceOp::kSum;
  DType dtype = DType::kU8;
  uint8_t codec = 0;  // 0 none, otherwise a number for the codec and its options
  uint64_t numel = 0;
  int32_t root = -1;     // neighbor_average: the number of the topology
  uint32_t variant = 0;  // what else must agree: a message's tag, neighbor_average's step, and the bits below

  bool operator==(const Operation&) const = default;
};
static_assert(sizeof(Operation) == 24);

// Of `variant`: of an all_reduce and of neighbor_average, which counts its steps in the other bits; of an all_reduce.
inline constexpr uint32_t kHierarchical = 1u << 31;
inline constexpr uint32_t kWithFeedback = 1u;

// Where a chain of ranks that wait for one another ends, as far as a rank knows: whoever asks along a chain finds out
// whom to name. Ranks are the job's, since a chain may lead through several groups.
struct ChainEnd {
  enum State : uint32_t {
    kUnknown,       // nobody has told yet
    kIsNotWaiting,  // it is there, and waits for nobody
    kHasNoGroup,    // nor has it made the group (yet) in which the witness waits for it
    kDoesNotAnswer,
    kUnreachable,   // nor does its host acknowledge what is sent to it
    kHasLeftGroup,  // it has destroyed the group in which the witness waits for it
  };
  int32_t rank = -1;
  int32_t witness = -1;  // who waits for it
  State state = kUnknown;
  uint32_t silent_ms = 0;  // for how long it has not answered the witness
  uint32_t age_ms = 0;     // how old all this is
  uint32_t padding = 0;
  Operation operation;  // of a rank that is not waiting
  Operation last_finished;
};

// What a rank is doing, as told to a peer that asks why it is kept waiting.
struct PeerStatus {
  Operation operation;        // kNone when idle
  Operation last_finished;    // kNone before the first
  int32_t waiting_for = -1;   // in this group
  uint32_t elsewhere_ms = 0;  // it waits in another group, for so long; which, and in what, stands in the next two
  Operation elsewhere;        // kNone: for a message
  std::array<char, 64> elsewhere_group{};  // ends with a 0; long names are cut
  ChainEnd end;                            // of the chain that begins with this rank
  // Of the rank that the question is about: whether this one hears from it.
  enum Hearing : uint32_t { kCannotTell, kNotYetKnown, kHears, kHearsNothing };
  Hearing hearing = kCannotTell;
  // Of the group that the question is about. A rank that does not have it waits, if at all, elsewhere, and leaves to
  // who asks to say whose status this is (`end`).
  enum Group : uint32_t { kHasMade, kHasNotMade, kHasLeft };
  Group group = kHasMade;
};

// "all_reduce #12 of 1024 float32 (SUM) with codec qsgd:bits=4"
std::string describe(const Operation& operation);

// The names behind Operation::codec and, in neighbor_average, Operation::root; empty for a number that has none: what
// numbers stand for is not known here. Whoever knows says so once, before there are ranks; until then messages show the
// number.
using CodecName = std::string (*)(uint8_t number);
void name_codecs_by(CodecName name);
using TopologyName = std::string (*)(int32_t number);
void name_topologies_by(TopologyName name);

// One posted send or receive. The caller keeps it, and the memory it names, alive until it is done or
// until Mesh::cancel has returned; after either, no thread touches them.
struct Request {
  std::atomic<bool> done{false};
  std::atomic<uint32_t> remaining{0};  // fragments still under way; the channel's own business
  int peer = -1;
  Stream stream;  // what orders the memory; for channels that move device memory
};

// In front of every message on the wire and in every ring; 32 bytes, little-endian.
struct MessageHeader {
  Operation operation;
  uint64_t bytes = 0;
};
static_assert(sizeof(MessageHeader) == 32);

// The InvalidArgument, showing both sides, of two ranks that are in different operations.
[[noreturn]] void throw_mismatch(const Operation& theirs, const Operation& mine, int peer);
// Throws it when a peer is doing, or has just done, another operation than this rank under the same number.
void check_status(const PeerStatus& theirs, const PeerStatus& mine, int peer);
// Throws it when a peer's message is not the one this rank expects.
void check_header(const MessageHeader& received, const MessageHeader& expected, int peer);

// Memory that other ranks of this host can map: which segment of its owner, and where in it.
struct Address {
  uint64_t segment = 0;
  uint64_t offset = 0;
};

class Channel {
 public:
  virtual ~Channel() = default;

  // Both return at once; `request->done` turns true when the memory may be reused (send) or holds the
  // message (receive). Zero bytes is legal and still synchronises.
  virtual void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) = 0;
  virtual void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) = 0;

  // Moves what can be moved without blocking; true if anything moved. Throws Error when the peer is gone
  // or sent something that does not match.
  virtual bool progress() = 0;

  // Forgets all posted requests; after it returns their memory is not touched any more.
  virtual void cancel() = 0;

  // After a peer's goodbye: whether progress() throws once everything that it sent before has been received. Without,
  // what it sent is there at the time of the goodbye.
  virtual bool reports_end() const { return false; }

  // True for ranks that are threads of one process: every pointer is an Address (segment 0).
  virtual bool addresses_any_memory() const { return false; }
  // Shared memory: can the peer's memory be addressed from here at all, and if so where.
  virtual bool shares_memory() const { return false; }
  // Pointer, valid in this process, to `bytes` bytes that the peer named by `address`; nullptr while the
  // mapping is being fetched (ask again after progress()).
  virtual void* resolve(const Address&, size_t) { return nullptr; }

  // Whether `data` may lie on a device: then the bytes move in the order of `request->stream`. Otherwise whoever posts
  // stages them through host memory, and the stream is null.
  virtual bool moves_device_memory() const { return false; }

  // "shm", "tcp", "torch", "local": for doctor, timeline and error messages
  virtual const char* kind() const = 0;
};

}  // namespace bagua

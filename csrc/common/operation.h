// Operation: what a rank believes it is doing. It goes in front of every message and into every answer about a rank's
// status, so that two ranks that call different collectives get an error which shows both sides.
//
// The numeric values are wire values: append, never renumber.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

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

// 24 bytes on the wire.
struct Operation {
  uint32_t sequence = 0;  // counts the collectives of the group; 0 for point-to-point
  OperationKind kind = OperationKind::kNone;
  ReduceOp reduce_op : 4 = ReduceOp::kSum;
  DeviceKind device : 4 = DeviceKind::kCpu;  // where the tensors lie: all ranks choose their algorithm by it
  DType dtype = DType::kU8;
  uint8_t codec = 0;  // 0 none, otherwise a number for the codec and its options
  uint64_t numel = 0;
  int32_t root = -1;     // neighbor_average: the number of the topology
  uint32_t variant = 0;  // what else must agree: a message's tag, neighbor_average's step, and the bits below

  bool operator==(const Operation&) const = default;
};
static_assert(sizeof(Operation) == 24);

// Bits of `variant`: of an all_reduce and of neighbor_average, which counts its steps in the other bits; of an
// all_reduce.
inline constexpr uint32_t kHierarchical = 1u << 31;
inline constexpr uint32_t kWithFeedback = 1u;

// The bits between, of an all_reduce and an all_gather: a number for what it is about, by which a program's operations
// of one size differ. 0: it does not say. With kCountsForwards the rest of it is twice the number of a model's
// forwards, plus 1 in train().
inline constexpr uint32_t kMaxSubject = (1u << 30) - 1;
inline constexpr uint32_t kCountsForwards = 1u << 29;
inline constexpr int kSubjectShift = 1;

// "all_reduce #12 of 1024 float32 (SUM) with codec qsgd:bits=4"; on a device "... of 1024 float32 on cuda (SUM) ..."
std::string describe(const Operation& operation);

// The names behind Operation::codec and, in neighbor_average, Operation::root; empty for a number that has none: what
// numbers stand for is not known here. Whoever knows says so once, before there are ranks; until then messages show the
// number.
using CodecName = std::string (*)(uint8_t number);
void name_codecs_by(CodecName name);
using TopologyName = std::string (*)(int32_t number);
void name_topologies_by(TopologyName name);

// The InvalidArgument of two ranks that disagree about what they do; `difference` shows both sides.
[[noreturn]] void throw_disagreement(const std::string& difference, const Operation& mine, int peer);
// The same of two ranks that are in different operations.
[[noreturn]] void throw_mismatch(const Operation& theirs, const Operation& mine, int peer);

}  // namespace bagua

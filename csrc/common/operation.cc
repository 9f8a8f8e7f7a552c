// Names of operations, and the error of ranks that disagree about them; see operation.h.
#include "csrc/common/operation.h"

#include "csrc/common/error.h"

namespace bagua {
namespace {

// Written before the threads that read them are made.
CodecName codec_name = nullptr;
TopologyName topology_name = nullptr;

template <typename Name, typename Number>
std::string name_of(Name name_by, Number number) {
  const std::string name = name_by == nullptr ? "" : name_by(number);
  return name.empty() ? std::to_string(number) : name;
}

}  // namespace

void name_codecs_by(CodecName name) { codec_name = name; }

void name_topologies_by(TopologyName name) { topology_name = name; }

std::string_view operation_name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kNone: return "nothing";
    case OperationKind::kAllReduce: return "all_reduce";
    case OperationKind::kReduce: return "reduce";
    case OperationKind::kReduceScatter: return "reduce_scatter";
    case OperationKind::kAllGather: return "all_gather";
    case OperationKind::kGather: return "gather";
    case OperationKind::kScatter: return "scatter";
    case OperationKind::kAllToAll: return "all_to_all";
    case OperationKind::kBroadcast: return "broadcast";
    case OperationKind::kBarrier: return "barrier";
    case OperationKind::kPointToPoint: return "send/recv";
    case OperationKind::kNeighborAverage: return "neighbor_average";
    case OperationKind::kDifferenceRingAverage: return "difference_ring_average";
  }
  return "an unknown operation";
}

std::string describe(const Operation& operation) {
  std::string text(operation_name(operation.kind));
  if (operation.kind == OperationKind::kNone) return text;
  if (operation.sequence != 0) text += " #" + std::to_string(operation.sequence);
  if (operation.kind == OperationKind::kBarrier) return text;
  text += " of " + std::to_string(operation.numel) + " ";
  text += static_cast<int>(operation.dtype) < kNumDTypes ? dtype_name(operation.dtype) : "values of an unknown type";
  if (operation.device != DeviceKind::kCpu) {
    text += static_cast<int>(operation.device) < kNumDeviceKinds
                ? std::string(" on ") + device_kind_name(operation.device)
                : " on an unknown device";
  }
  const bool reduces = operation.kind == OperationKind::kAllReduce || operation.kind == OperationKind::kReduce ||
                       operation.kind == OperationKind::kReduceScatter;
  if (reduces && static_cast<int>(operation.reduce_op) < kNumReduceOps) {
    text += " (" + std::string(reduce_op_name(operation.reduce_op)) + ")";
  }
  if (operation.codec != 0) text += " with codec " + name_of(codec_name, operation.codec);
  if (operation.kind == OperationKind::kNeighborAverage) {
    return text + " in topology " + name_of(topology_name, operation.root) + " at step " +
           std::to_string(operation.variant & ~kHierarchical) +
           ((operation.variant & kHierarchical) != 0 ? ", hierarchical" : "");
  }
  if (operation.root >= 0) text += " at rank " + std::to_string(operation.root);
  if (operation.kind == OperationKind::kPointToPoint) {
    return operation.variant == 0 ? text : text + " with tag " + std::to_string(operation.variant);
  }
  const uint32_t subject = operation.variant >> kSubjectShift & kMaxSubject;
  if ((subject & kCountsForwards) != 0) {
    text += " after " + std::to_string((subject & ~kCountsForwards) / 2) + " forwards of the model";
    if (subject % 2 == 0) text += " in eval()";
  } else if (subject != 0) {
    text += " about subject " + std::to_string(subject);
  }
  if ((operation.variant & kHierarchical) != 0) text += ", hierarchical";
  if ((operation.variant & kWithFeedback) != 0) text += ", with error feedback";
  return text;
}

void throw_disagreement(const std::string& difference, const Operation& mine, int peer) {
  throw Error(
      ErrorKind::kInvalidArgument,
      difference + "; all ranks of a group must make the same calls in the same order with the same sizes and types",
      peer, std::string(operation_name(mine.kind)));
}

void throw_mismatch(const Operation& theirs, const Operation& mine, int peer) {
  std::string difference =
      "rank " + std::to_string(peer) + " called " + describe(theirs) + " while this rank called " + describe(mine);
  if (theirs.device != mine.device) difference += " (tensors of one rank are on the CPU, the other's are not)";
  throw_disagreement(difference, mine, peer);
}

}  // namespace bagua

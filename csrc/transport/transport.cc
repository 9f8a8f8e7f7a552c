// Names and checks of the transport contract; see transport.h.
#include "csrc/transport/transport.h"

#include "csrc/common/error.h"

namespace bagua {

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
  const bool reduces = operation.kind == OperationKind::kAllReduce || operation.kind == OperationKind::kReduce ||
                       operation.kind == OperationKind::kReduceScatter;
  if (reduces && static_cast<int>(operation.reduce_op) < kNumReduceOps) {
    text += " (" + std::string(reduce_op_name(operation.reduce_op)) + ")";
  }
  if (operation.codec != 0) text += " with codec " + std::to_string(operation.codec);
  if (operation.root >= 0) text += " at rank " + std::to_string(operation.root);
  if (operation.tag != 0) text += " with tag " + std::to_string(operation.tag);
  return text;
}

void check_header(const MessageHeader& received, const MessageHeader& expected, int peer) {
  if (received.operation == expected.operation && received.bytes == expected.bytes) return;
  std::string message = "rank " + std::to_string(peer) + " called " + describe(received.operation) +
                        " while this rank called " + describe(expected.operation);
  if (received.operation == expected.operation) {
    message = "in " + describe(expected.operation) + " rank " + std::to_string(peer) + " sent " +
              std::to_string(received.bytes) + " bytes where this rank expected " + std::to_string(expected.bytes);
  }
  message += "; all ranks of a group must make the same calls in the same order with the same sizes and types";
  throw Error(ErrorKind::kInvalidArgument, message, peer, std::string(operation_name(expected.operation.kind)));
}

}  // namespace bagua

// all_gather: the choice, and the one-step algorithm: every rank sends its block to every other one.
// 1 step, (n-1) * b bytes sent per rank, a connection to every rank, no workspace.

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

void pairwise_all_gather(Context& context, const void* input, void* output, size_t bytes) {
  if (bytes == 0) return;
  const auto size = static_cast<size_t>(context.group.size());
  const auto rank = static_cast<size_t>(context.group.rank());
  PostedRequests requests(context.group, 2 * size);
  for (size_t step = 1; step < size; ++step) {
    const size_t from = (rank + size - step) % size, to = (rank + step) % size;
    requests.recv(from, static_cast<int>(from), at(output, from * bytes, 1), bytes);
    requests.send(size + to, static_cast<int>(to), input, bytes);
  }
  uint8_t* mine = at(output, rank * bytes, 1);
  if (mine != input) device::copy(mine, input, bytes, context.stream);
  requests.wait_all();
}

void all_gather(Context& context, const void* input, void* output, size_t bytes) {
  const int size = context.group.size();
  if (bytes == 0) return;
  if (size == 1) {
    if (output != input) device::copy(output, input, bytes, context.stream);
    return;
  }
  Reach reach = reach_of(context, bytes, OperationKind::kAllGather, DType::kU8);
  if (select_all_gather(context.thresholds, bytes, size, reach) == AllGatherAlgorithm::kDirect) {
    if (direct_all_gather(context, input, output, bytes)) return;
    reach = Reach::kMessages;
  }
  switch (select_all_gather(context.thresholds, bytes, size, reach)) {
    case AllGatherAlgorithm::kRing: ring_all_gather(context, input, output, bytes); break;
    case AllGatherAlgorithm::kNative: native_all_gather(context, input, output, bytes); break;
    default: pairwise_all_gather(context, input, output, bytes); break;
  }
}

}  // namespace bagua::collectives

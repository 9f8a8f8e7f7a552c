// scatter: the root sends every rank its block, a bounded number at a time.
// 1 step per window; (n-1) * b bytes sent by the root, b received per rank; no workspace.

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

void scatter(Context& context, const void* input, void* output, size_t bytes, int root) {
  const GroupView& group = context.group;
  if (bytes == 0) return;
  if (group.rank() != root) {
    group.recv(root, output, bytes);
    return;
  }
  PostedRequests requests(group, kPairwiseWindow);
  for (int peer = 0; peer < group.size(); ++peer) {
    const uint8_t* block = at(input, static_cast<size_t>(peer) * bytes, 1);
    if (peer == root) {
      if (output != block) device::copy(output, block, bytes, context.stream);
      continue;
    }
    const size_t slot = static_cast<size_t>(peer) % kPairwiseWindow;
    requests.wait(slot);
    requests.send(slot, peer, block, bytes);
  }
  requests.wait_all();
}

}  // namespace bagua::collectives

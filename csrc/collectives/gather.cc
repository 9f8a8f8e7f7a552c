// gather: every rank sends its block straight to the root, which receives a bounded number at a time.
// 1 step per window; b bytes sent per rank, (n-1) * b received by the root; no workspace.

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {

void gather(Context& context, const void* input, void* output, size_t bytes, int root) {
  const GroupView& group = context.group;
  if (bytes == 0) return;
  if (group.rank() != root) {
    group.send(root, input, bytes);
    return;
  }
  PostedRequests requests(group, kPairwiseWindow);
  for (int peer = 0; peer < group.size(); ++peer) {
    uint8_t* block = at(output, static_cast<size_t>(peer) * bytes, 1);
    if (peer == root) {
      if (block != input) device::copy(block, input, bytes, context.stream);
      continue;
    }
    const size_t slot = static_cast<size_t>(peer) % kPairwiseWindow;
    requests.wait(slot);
    requests.recv(slot, peer, block, bytes);
  }
  requests.wait_all();
}

}  // namespace bagua::collectives

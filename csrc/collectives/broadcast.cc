// broadcast: the choice, and its two algorithms over messages.
//
// Tree (small): a binomial tree from the root; log2 n steps, the root sends log2 n * B bytes.
// Chain (large): root -> root+1 -> ... in chunks, each passed on as soon as it has arrived; n-2 + chunks
// steps, B bytes sent per rank. No workspace: everything arrives in its final memory.
#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"

namespace bagua::collectives {

void tree_broadcast(Context& context, void* data, size_t bytes, int root) {
  if (bytes == 0) return;
  const GroupView& group = context.group;
  const int size = group.size();
  const int relative = (group.rank() - root + size) % size;
  int distance = 1;
  while (distance < size && (relative & distance) == 0) distance *= 2;
  if (relative != 0) group.recv((group.rank() - distance + size) % size, data, bytes);
  // The farthest subtree, which is the largest, first; all sends are under way together.
  PostedRequests requests(group, 32);
  size_t num_sends = 0;
  for (distance /= 2; distance > 0; distance /= 2) {
    if (relative + distance < size) requests.send(num_sends++, (group.rank() + distance) % size, data, bytes);
  }
  requests.wait_all();
}

void chain_broadcast(Context& context, void* data, size_t bytes, int root) {
  if (bytes == 0) return;
  const GroupView& group = context.group;
  const int size = group.size();
  const int relative = (group.rank() - root + size) % size;
  const int left = (group.rank() + size - 1) % size, right = (group.rank() + 1) % size;
  const bool receives = relative > 0, sends = relative < size - 1;
  const Chunks chunks = chain_chunks(bytes);
  constexpr size_t kWindow = kChainLookahead + 1;
  PostedRequests requests(group, 2 * kWindow);
  for (size_t k = 0; k < chunks.count + kChainLookahead; ++k) {
    if (k < chunks.count && receives) {
      const Range chunk = chunk_of({0, bytes}, chunks.numel, k);
      requests.recv(2 * (k % kWindow), left, at(data, chunk.begin, 1), chunk.numel);
    }
    if (k < kChainLookahead) continue;
    const size_t arriving = k - kChainLookahead;
    requests.wait(2 * (arriving % kWindow));
    if (!sends) continue;
    const size_t slot = 2 * (arriving % kWindow) + 1;
    requests.wait(slot);
    const Range chunk = chunk_of({0, bytes}, chunks.numel, arriving);
    requests.send(slot, right, at(data, chunk.begin, 1), chunk.numel);
  }
  requests.wait_all();
}

void broadcast(Context& context, void* data, size_t bytes, int root) {
  const int size = context.group.size();
  if (size == 1 || bytes == 0) return;
  Reach reach = reach_of(context, bytes, OperationKind::kBroadcast, DType::kU8);
  if (select_broadcast(context.thresholds, bytes, size, reach) == BroadcastAlgorithm::kDirect) {
    if (direct_broadcast(context, data, bytes, root)) return;
    reach = Reach::kMessages;
  }
  switch (select_broadcast(context.thresholds, bytes, size, reach)) {
    case BroadcastAlgorithm::kChain: chain_broadcast(context, data, bytes, root); break;
    case BroadcastAlgorithm::kNative: native_broadcast(context, data, bytes, root); break;
    default: tree_broadcast(context, data, bytes, root); break;
  }
}

}  // namespace bagua::collectives

// Direct all_gather: ranks of one host whose inputs lie in shared memory.
//
// Every rank copies all blocks from their owners' memory into its output. Steps: one exchange of addresses,
// the copies, a barrier. Bytes through memory per rank: n*b read and written, for blocks of b. An input that
// is its own block of the output is legal: no rank writes there.
#include <cstring>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/shared_buffers.h"

namespace bagua::collectives {

bool direct_all_gather(Context& context, const void* input, void* output, size_t bytes) {
  if (bytes == 0) return true;
  const auto size = static_cast<size_t>(context.group.size());
  const auto rank = static_cast<size_t>(context.group.rank());
  const SharedBuffers shared = exchange_buffers(context, input, bytes, nullptr, 0);
  if (shared.sharing == Sharing::kNone) return false;
  // Starting with the own block spreads the ranks over the owners.
  for (size_t step = 0; step < size; ++step) {
    const size_t owner = (rank + step) % size;
    uint8_t* block = at(output, owner * bytes, 1);
    if (block != shared.at[owner]) std::memcpy(block, shared.at[owner], bytes);
  }
  context.group.count_moved((size - 1) * bytes, (size - 1) * bytes);
  barrier(context);
  return true;
}

}  // namespace bagua::collectives

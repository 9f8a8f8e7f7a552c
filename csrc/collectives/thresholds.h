// The sizes at which one algorithm takes over from another, in bytes: every one that the selector knows.
//
// benchmarks/micro/crossovers.py measures where they should lie; another network may have others than these defaults,
// which a user sets by name. All ranks must use the same: they choose without a message.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace bagua::collectives {

struct Thresholds {
  // Up to here an all_reduce costs latency, not bandwidth: recursive doubling has log2 n steps where the others have at
  // least two plus a barrier.
  size_t recursive_doubling_bytes = 32 << 10;
  // Blocks of a reduce_scatter or an all_gather: up to here one exchange beats a pipeline of n-1 steps.
  size_t pairwise_bytes = 16 << 10;
  // A tree moves the tensor log2 n times over the root's link, a chain once.
  size_t broadcast_tree_bytes = 4 << 10;
  size_t reduce_tree_bytes = 16 << 10;
  // From here on reading a peer's memory beats a message, whose cost is one more copy but no exchange of addresses.
  size_t direct_bytes = 32 << 10;

  // Up to here the host computes a reduction of a device's tensors that are staged (on_host.h).
  size_t on_host_bytes = 1 << 20;

  // How much larger chunks are on a device than on the CPU: each costs launches, some microseconds apiece and tenths of
  // a millisecond where processes share the device, and caches do not count there. Tests of many chunks lower it.
  size_t device_chunk_scale = 8;

  std::map<std::string, size_t> by_name() const;
  // Throws InvalidArgument for a name that is none of the above.
  void set(std::string_view name, size_t bytes);
};

}  // namespace bagua::collectives

// Hierarchical all_reduce: inside every node at full precision, then among the nodes' leaders (with the codec, if
// any), then inside every node again. What crosses the network is one tensor per node instead of one per rank.
//
// Runs as one operation of the whole group's engine, which drives the engines of two smaller groups: the ranks
// of this node, the lowest of which leads, and the leaders. Only it submits to them, so their order is its order.
// A failure in any of the three during an operation fails all three; its ranks are those of the smaller group.
//
// Nodes may have different numbers of ranks: sums are added and divided by the number of ranks at the end, never
// means by the number of nodes. f16 and bf16 averages, whose sums may overflow, add node means weighted by ranks.
// Steps: reduce + all_reduce + broadcast. Bytes sent between nodes per leader: those of the leaders' all_reduce.
// Source: section 3.3 of arXiv 2107.01499.
#pragma once

#include "csrc/engine/engine.h"

namespace bagua {

struct Hierarchy {
  Engine* node = nullptr;     // ranks of this node, by rank in the whole group; rank 0 leads
  Engine* leaders = nullptr;  // one rank per node; null on the other ranks, and where there is one node
};

// What `whole` is to run; the engines must outlive it.
Engine::Run hierarchical_all_reduce(Hierarchy hierarchy, void* data, size_t numel, DType dtype, ReduceOp op,
                                    const Codec* codec, Engine::Timeout timeout);

}  // namespace bagua

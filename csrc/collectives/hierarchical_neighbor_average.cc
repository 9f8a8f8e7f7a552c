// Hierarchical neighbor_average: the mean inside every node, neighbor_average among the nodes' leaders (with the codec,
// if any), the result to every rank of the node. What crosses the network is one tensor per neighbouring node.
//
// Nodes may have different numbers of ranks. Of the topology's weights w_kl between nodes k and l of n_k and n_l ranks,
// m the smallest number, it takes w_kl m / n_k for l != k and the rest for k itself. That keeps equal values as they
// are, and since n_k (w_kl m / n_k) = m w_kl, whose sums over k are those of a doubly stochastic matrix, also the mean
// over all ranks. Where every rank averages with every rank it is a hierarchical all_reduce, the exact mean.
// Source: section 3.3 of arXiv 2107.01499.
#include "csrc/collectives/algorithms.h"

namespace bagua::collectives {

size_t hierarchical_neighbor_average(Context& context, const Hierarchy& hierarchy, int smallest_node, void* data,
                                     size_t numel, DType dtype, std::vector<Neighbor> neighbors, const Codec* codec,
                                     const InputSegments& segments) {
  require_average(dtype, codec);
  segments.copy_to(data, numel, item_bytes(dtype), context.stream);
  if (is_mean_of_all(neighbors, static_cast<int>(hierarchy.leaders.size())) || hierarchy.leaders.size() == 1) {
    return hierarchical_all_reduce(context, hierarchy, data, numel, dtype, ReduceOp::kAvg, codec);
  }
  Context node = among(context, hierarchy.node);
  reduce(node, data, numel, dtype, ReduceOp::kAvg, 0);
  size_t num_nonfinite_blocks = 0;
  if (node.group.rank() == 0 && numel > 0) {
    Context leaders = among(context, hierarchy.leaders);
    const double share = static_cast<double>(smallest_node) / node.group.size();
    double rest = 1.0;
    for (Neighbor& neighbor : neighbors) {
      if (neighbor.rank == leaders.group.rank()) continue;
      neighbor.weight *= share;
      rest -= neighbor.weight;
    }
    for (Neighbor& neighbor : neighbors) {
      if (neighbor.rank == leaders.group.rank()) neighbor.weight = rest;
    }
    num_nonfinite_blocks = exchange_average(leaders, data, numel, dtype, neighbors, codec);
  }
  broadcast(node, data, numel * item_bytes(dtype), 0);
  return num_nonfinite_blocks;
}

}  // namespace bagua::collectives

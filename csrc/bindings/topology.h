// Neighbourhoods of the Rust topologies, as the collectives take them.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/collectives/collectives.h"

namespace bagua {

// `topology` is an index in the list of names. Throws InvalidArgument for one that is not.
std::vector<collectives::Neighbor> topology_neighbors(int topology, int size, int rank, uint64_t step);

}  // namespace bagua

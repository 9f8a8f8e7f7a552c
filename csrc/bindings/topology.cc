// The Rust topologies (rust_core/src/topology.rs) for Python and for the collectives.
#include "csrc/bindings/topology.h"

#include <cstddef>
#include <string>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/call_rust.h"

namespace py = pybind11;

namespace bagua {
namespace {

static_assert(sizeof(BaguaNeighbor) == 24 && offsetof(BaguaNeighbor, weight) == 8 &&
              offsetof(BaguaNeighbor, is_target) == 20);

std::vector<std::string> topologies() {
  std::vector<std::string> names;
  char name[64];
  BaguaRustError error;
  while (bagua_topology_name(static_cast<uint32_t>(names.size()), name, sizeof name, &error) == BAGUA_RUST_OK) {
    names.emplace_back(name);
  }
  return names;
}

}  // namespace

std::vector<collectives::Neighbor> topology_neighbors(int topology, int size, int rank, uint64_t step) {
  std::vector<BaguaNeighbor> found(static_cast<size_t>(size));
  uint64_t num_found = 0;
  call_rust("neighbor_average", bagua_topology_neighbors, static_cast<uint32_t>(topology), static_cast<uint64_t>(size),
            static_cast<uint64_t>(rank), step, found.data(), static_cast<uint64_t>(found.size()), &num_found);
  std::vector<collectives::Neighbor> neighbors;
  for (size_t i = 0; i < num_found; ++i) {
    neighbors.push_back(
        {static_cast<int>(found[i].rank), found[i].weight, found[i].is_source != 0, found[i].is_target != 0});
  }
  return neighbors;
}

void bind_topology(py::module_& m) {
  m.def("topologies", &topologies,
        "The names of the topologies of neighbor_average; a place is the topology's number.");
}

}  // namespace bagua

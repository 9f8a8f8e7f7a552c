// The Rust topologies (rust_core/src/topology.rs) for Python and for the collectives.
#include "csrc/bindings/topology.h"

#include <cstddef>
#include <string>
#include <utility>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/call_rust.h"
#include "csrc/transport/transport.h"

namespace py = pybind11;

namespace bagua {
namespace {

static_assert(sizeof(BaguaNeighbor) == 24 && offsetof(BaguaNeighbor, weight) == 8 &&
              offsetof(BaguaNeighbor, is_target) == 17);

// Empty for a number that has none.
std::string topology_name(int32_t number) {
  char name[64];
  BaguaRustError error;
  // A negative number becomes one that is far out of range.
  const auto status = bagua_topology_name(static_cast<uint32_t>(number), name, sizeof name, &error);
  return status == BAGUA_RUST_OK ? name : "";
}

std::vector<std::string> topologies() {
  std::vector<std::string> names;
  for (;;) {
    std::string name = topology_name(static_cast<int32_t>(names.size()));
    if (name.empty()) return names;
    names.push_back(std::move(name));
  }
}

}  // namespace

std::vector<collectives::Neighbor> topology_neighbors(int topology, int size, int rank, uint64_t step) {
  std::vector<BaguaNeighbor> found(static_cast<size_t>(size));
  uint64_t num_found = 0;
  call_rust("neighbor_average", bagua_topology_neighbors, static_cast<uint32_t>(topology), static_cast<uint64_t>(size),
            static_cast<uint64_t>(rank), step, found.data(), static_cast<uint64_t>(found.size()), &num_found);
  std::vector<collectives::Neighbor> neighbors;
  for (size_t i = 0; i < num_found; ++i) {
    neighbors.push_back({static_cast<int>(found[i].rank), found[i].weight, found[i].is_source, found[i].is_target});
  }
  return neighbors;
}

void bind_topology(py::module_& m) {
  name_topologies_by(&topology_name);  // for error messages
  m.def("topologies", &topologies,
        "The names of the topologies of neighbor_average; an index is the topology's number.");
  m.def(
      "topology_peers",
      [](int topology, int size, int rank, uint64_t step) {
        std::pair<std::vector<int>, std::vector<int>> peers;
        for (const collectives::Neighbor& neighbor : topology_neighbors(topology, size, rank, step)) {
          if (neighbor.is_target) peers.first.push_back(neighbor.rank);
          if (neighbor.is_source) peers.second.push_back(neighbor.rank);
        }
        return peers;
      },
      py::arg("topology"), py::arg("size"), py::arg("rank"), py::arg("step"),
      "The ranks that `rank` sends to at `step`, and those that it receives from.");
}

}  // namespace bagua

// The simulator (rust_core/src/simulator.rs) for Python, and groups that rehearse for it.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/call_rust.h"
#include "csrc/bindings/group.h"

namespace py = pybind11;

namespace bagua {
namespace {

// The layouts that rust_core/src/ffi.rs tests on its side.
static_assert(sizeof(BaguaRehearsedStep) == 32 && offsetof(BaguaRehearsedStep, busy_ns) == 24);
static_assert(sizeof(BaguaNetwork) == 64 && offsetof(BaguaNetwork, slowdown) == 56);
static_assert(sizeof(BaguaCost) == 24 && sizeof(BaguaEntry) == 16 && offsetof(BaguaEntry, seconds) == 8);
static_assert(sizeof(BaguaOperation) == 40 && offsetof(BaguaOperation, busy) == 32);
static_assert(sizeof(BaguaConditions) == 48 && offsetof(BaguaConditions, burst) == 40);

std::unique_ptr<Group> rehearsal(const std::string& name, int rank, std::vector<bool> same_host,
                                 const std::map<std::string, size_t>& thresholds) {
  const int size = static_cast<int>(same_host.size());
  auto communicator = std::make_unique<Communicator>(rank, size, name, std::chrono::microseconds(0));
  communicator->set_same_host(std::move(same_host));
  communicator->rehearse();
  collectives::Thresholds chosen;
  for (const auto& [threshold, bytes] : thresholds) chosen.set(threshold, bytes);
  return std::make_unique<Group>(std::move(communicator), chosen);
}

Rehearsal::Steps steps_of(Group& group, uint64_t ticket) {
  const Rehearsal* rehearsal = group.communicator().rehearsal();
  // A group's tickets count its operations from 1.
  if (rehearsal != nullptr && ticket > 0) {
    Rehearsal::Steps steps = rehearsal->operation(ticket - 1);
    if (!steps.empty()) return steps;
  }
  throw Error(ErrorKind::kInvalidArgument,
              "ticket " + std::to_string(ticket) + " is of no operation that this group has rehearsed; wait for it",
              group.communicator().rank());
}

std::tuple<double, double, double> rehearsed_cost(Group& group, uint64_t ticket, uint64_t ranks_per_host, double up,
                                                  double down, double latency, double local, double per_message,
                                                  double slowdown) {
  std::vector<BaguaRehearsedStep> steps;
  for (const RehearsedStep& step : steps_of(group, ticket)) {
    steps.push_back({step.kind, step.peer, step.bytes, step.about, step.busy_ns});
  }
  const auto size = static_cast<uint64_t>(group.communicator().size());
  const auto rank = static_cast<uint64_t>(group.communicator().rank());
  const BaguaNetwork network{size, ranks_per_host, up, down, latency, local, per_message, slowdown};
  BaguaCost cost;
  call_rust("simulate", bagua_rehearsed_cost, steps.data(), steps.size(), rank, &network, &cost);
  return {cost.seconds, cost.busy, cost.link_bytes};
}

using Times = std::vector<double>;

std::tuple<Times, Times, Times, Times> play(
    const std::vector<std::tuple<uint32_t, uint32_t, double>>& program,
    const std::vector<std::tuple<double, uint32_t, uint64_t, double, double>>& operations, uint64_t size, double sigma,
    uint64_t seed, uint64_t slow_rank, double slow_factor, double rate, double burst) {
  std::vector<BaguaEntry> entries;
  size_t num_steps = 0;
  for (const auto& [action, operation, seconds] : program) {
    entries.push_back({action, operation, seconds});
    num_steps += action == 3;
  }
  std::vector<BaguaOperation> all;
  for (const auto& [seconds, topology, step, bytes, busy] : operations) {
    all.push_back({seconds, topology, step, bytes, busy});
  }
  const BaguaConditions conditions{sigma, seed, slow_rank, slow_factor, rate, burst};
  Times step_ends(num_steps * size), waited(num_steps * size), begins(all.size() * size), ends(all.size() * size);
  call_rust("simulate", bagua_play, entries.data(), entries.size(), all.data(), all.size(), size, &conditions,
            step_ends.data(), waited.data(), step_ends.size(), begins.data(), ends.data(), ends.size());
  const auto of_first = [&](const Times& times) {
    Times first;
    for (size_t i = 0; i < all.size(); ++i) first.push_back(times[i * size]);
    return first;
  };
  return {std::move(step_ends), std::move(waited), of_first(begins), of_first(ends)};
}

}  // namespace

void bind_simulator(py::module_& m) {
  m.def("rehearsal", &rehearsal, py::arg("name"), py::arg("rank"), py::arg("same_host"), py::arg("thresholds"),
        "A group of as many ranks as `same_host` has entries, of which only this one exists.");
  m.def("rehearsed_cost", &rehearsed_cost, py::arg("group"), py::arg("ticket"), py::arg("ranks_per_host"),
        py::arg("up"), py::arg("down"), py::arg("latency"), py::arg("local"), py::arg("per_message"),
        py::arg("slowdown"), "Seconds, seconds of processor time among them, and bytes of a host's link.");
  m.def("play", &play, py::arg("program"), py::arg("operations"), py::arg("size"), py::arg("sigma"), py::arg("seed"),
        py::arg("slow_rank"), py::arg("slow_factor"), py::arg("rate"), py::arg("burst"),
        "Ends of the steps and waits in them, by rank; begins and ends of rank 0's operations.");
}

}  // namespace bagua

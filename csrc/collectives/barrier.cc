// barrier. Among few ranks every rank sends every rank a note, 1 step, so that no rank is woken twice: on a host with
// more ranks than cores, waking up is what costs. Among more a dissemination: in round s every rank sends a note to
// rank + 2^s and waits for one from rank - 2^s, ceil(log2 n) steps. No bytes. Source of the latter: Hensgen, Finkel,
// Manber, "Two algorithms for barrier synchronization", 1988.
#include "csrc/collectives/collectives.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"

namespace bagua::collectives {
namespace {

void pairwise_barrier(const GroupView& group) {
  const auto size = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  PostedRequests notes(group, 2 * size);
  for (size_t step = 1; step < size; ++step) {
    const size_t from = (rank + size - step) % size, to = (rank + step) % size;
    notes.recv_note(from, static_cast<int>(from));
    notes.send_note(size + to, static_cast<int>(to));
  }
  notes.wait_all();
}

void dissemination_barrier(const GroupView& group) {
  const int size = group.size();
  for (int distance = 1; distance < size; distance *= 2) {
    const int to = (group.rank() + distance) % size;
    const int from = (group.rank() + size - distance) % size;
    group.send_recv(to, nullptr, 0, from, nullptr, 0);
  }
}

}  // namespace

void barrier(Context& context) {
  if (context.group.size() <= kMaxPairwiseBarrierRanks) {
    pairwise_barrier(context.group);
  } else {
    dissemination_barrier(context.group);
  }
}

}  // namespace bagua::collectives

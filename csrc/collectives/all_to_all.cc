// all_to_all: pairwise exchange. In step s every rank sends to rank + s and receives from rank - s, so no rank
// is every rank's target at once. n-1 steps, of which a bounded number is under way; every byte is sent
// once; no workspace.

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/device/memory.h"

namespace bagua::collectives {
namespace {

size_t offset_of(const std::vector<size_t>& splits, size_t rank) {
  size_t offset = 0;
  for (size_t r = 0; r < rank; ++r) offset += splits[r];
  return offset;
}

void require_length(const std::vector<size_t>& splits, int size, const char* name) {
  if (splits.size() == static_cast<size_t>(size)) return;
  throw Error(ErrorKind::kInvalidArgument,
              "all_to_all: " + std::string(name) + " has " + std::to_string(splits.size()) +
                  " entries; pass one per rank, " + std::to_string(size),
              -1, "all_to_all");
}

}  // namespace

void require_splits(const GroupView& group, const std::vector<size_t>& input_splits,
                    const std::vector<size_t>& output_splits) {
  require_length(input_splits, group.size(), "input_splits");
  require_length(output_splits, group.size(), "output_splits");
  const auto rank = static_cast<size_t>(group.rank());
  if (input_splits[rank] == output_splits[rank]) return;
  throw Error(ErrorKind::kInvalidArgument,
              "all_to_all: this rank's part for itself is " + std::to_string(input_splits[rank]) +
                  " in the input and " + std::to_string(output_splits[rank]) + " in the output",
              group.rank(), "all_to_all");
}

void all_to_all(Context& context, const void* input, const std::vector<size_t>& input_splits, void* output,
                const std::vector<size_t>& output_splits) {
  const GroupView& group = context.group;
  require_splits(group, input_splits, output_splits);
  const auto size = static_cast<size_t>(group.size());
  const auto rank = static_cast<size_t>(group.rank());
  PostedRequests requests(group, 2 * kPairwiseWindow);
  for (size_t step = 1; step < size; ++step) {
    const size_t slot = 2 * (step % kPairwiseWindow);
    requests.wait_range(slot, slot + 2);
    const size_t from = (rank + size - step) % size, to = (rank + step) % size;
    requests.recv(slot, static_cast<int>(from), at(output, offset_of(output_splits, from), 1), output_splits[from]);
    requests.send(slot + 1, static_cast<int>(to), at(input, offset_of(input_splits, to), 1), input_splits[to]);
  }
  if (input_splits[rank] > 0) {
    device::copy(at(output, offset_of(output_splits, rank), 1), at(input, offset_of(input_splits, rank), 1),
                 input_splits[rank], context.stream);
  }
  requests.wait_all();
}

}  // namespace bagua::collectives

// The collectives of one group, as its worker thread runs them. One algorithm per file; selector.cc picks.
//
// Each call is made by all ranks with matching arguments, between Communicator::begin and Communicator::end (the engine
// does that), blocks until this rank's part is done, and throws Error. After a throw the caller must call
// Communicator::cancel before it frees the buffers. Sizes are 64-bit. numel 0 is legal everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "csrc/codecs/codec.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/input_segments.h"
#include "csrc/collectives/thresholds.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/event_log.h"
#include "csrc/communicator/group_view.h"
#include "csrc/device/workspace.h"

namespace bagua {

// The surroundings that a collective works with besides its arguments.
struct Context {
  GroupView group;
  Workspace& workspace;       // of the stream's device
  Workspace& host_workspace;  // the same for operations of the CPU
  EventLog& events;
  Stream stream;
  const collectives::Thresholds& thresholds;
  uint64_t rng_key = 0;  // of codecs that round at random; differs between ranks, so that their errors do not add up

  size_t chunk_scale() const { return stream.is_cpu() ? 1 : thresholds.device_chunk_scale; }

  // Whether the result is finite, where an operation of the CPU has looked.
  std::optional<bool> is_result_finite = {};

  // Returns, on a device, at least so many bytes of pinned memory, until the next operation's.
  std::function<void*(size_t bytes)> pinned = {};
};

namespace collectives {

// The residuals of error feedback (arXiv 1901.09847; both ends of C_LP_S as in section 3.2 of arXiv 2107.01499): what
// an encoding lost is added to what is encoded next, in f32. Where they are written may be where they are read, or
// apart from it, so that a step that is given up after all leaves them as they were. Null: none.
struct Feedback {
  const void* worker_in = nullptr;  // of this rank's input, numel
  void* worker_out = nullptr;
  const void* owner_in = nullptr;  // of the reduced stripe that this rank owns: owned_stripe
  void* owner_out = nullptr;
  DType dtype = DType::kF32;  // of all four; f32 or bf16
  // The operation's, and so equal on all ranks; one that encodes nothing has no residuals.
  bool is_asked_for = worker_out != nullptr;

  bool is_on() const { return worker_out != nullptr; }
};

// The stripe of a compressed all_reduce of numel elements among `size` ranks that the rank-th of them reduces.
Range owned_stripe(size_t numel, int size, int rank, const Codec& codec);

// data[i] <- op over ranks of data[i], in place. With a codec: the two-shot compressed all-reduce, SUM
// and AVG of f32, f16, bf16 only; returns the number of blocks (of this rank's input and its reduced stripe) that held
// a NaN or Inf. World size 1 leaves data as it is (codec or not). With `segments` this rank's data are theirs, and
// `data` is for the result alone: the compressed one encodes them where they lie, the others copy them first.
size_t all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, const Codec* codec,
                  const Feedback& feedback = {}, const InputSegments& segments = {});

// The same in three stages: inside the nodes, among the lowest ranks of all nodes, which lead them, inside the nodes.
// Counts non-finite blocks on the leaders only.
struct Hierarchy {
  std::vector<int> node;     // the ranks of this rank's node, ascending
  std::vector<int> leaders;  // the lowest rank of every node, ascending
};
size_t hierarchical_all_reduce(Context& context, const Hierarchy& hierarchy, void* data, size_t numel, DType dtype,
                               ReduceOp op, const Codec* codec, const Feedback& feedback = {},
                               const InputSegments& segments = {});

// output (numel elements) <- op over ranks of the rank-th of size blocks of numel elements of their input. output may
// be that block, and nothing else of the input, which otherwise stays as it is. The same holds with a codec, and of
// scatter.
void reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op);

// output[r * bytes ...] <- input of rank r. output may contain input as this rank's block, and nowhere else. The same
// holds with a codec, and of gather.
void all_gather(Context& context, const void* input, void* output, size_t bytes);

// Splits in bytes, one per rank; input_splits[r] of this rank equals output_splits[rank] of rank r. Input and output
// are apart.
void all_to_all(Context& context, const void* input, const std::vector<size_t>& input_splits, void* output,
                const std::vector<size_t>& output_splits);

// data <- sum over `neighbors` of weight * their data, in place; floating types. `neighbors` are ascending by rank and
// include this one; rank i lists j as a source where j lists i as a target. With a codec the others' values pass
// through it (f32, f16, bf16). Returns the number of blocks of this rank's data that held a NaN or Inf. With `segments`
// the values come from there instead of data.
struct Neighbor {
  int rank;
  double weight;
  bool is_source;
  bool is_target;
};
size_t neighbor_average(Context& context, void* data, size_t numel, DType dtype, const std::vector<Neighbor>& neighbors,
                        const Codec* codec, const InputSegments& segments = {});

// The same of the nodes' means, which their leaders average: `neighbors` are indices of hierarchy.leaders, and only the
// leaders' are used. `smallest_node` is the least number of ranks of any node. Rows and columns, a node counting by its
// ranks, add up to 1 as without nodes, so the mean over all ranks is kept. The codec, if any, is for what travels among
// the leaders.
size_t hierarchical_neighbor_average(Context& context, const Hierarchy& hierarchy, int smallest_node, void* data,
                                     size_t numel, DType dtype, std::vector<Neighbor> neighbors, const Codec* codec,
                                     const InputSegments& segments = {});

// One step of decentralised training with compressed differences (arXiv 1803.06443, algorithm 1), on a ring. Every rank
// keeps replicas of its own weights as the others know them and of its neighbours'; all f32, numel:
//   z = data + left/3 + right/3 - 5/3 own;  own += D(C(z));  left, right += what they sent;  data <- own
// so that own stays bit-equal to the right neighbour's left and the left one's right. Among two ranks both neighbours
// are the other one, and `left` and `right` may be the same memory. World size 1: nothing. f32, f16, bf16. Returns the
// number of blocks of z that held a NaN or Inf.
struct Replicas {
  float* own;
  float* left;
  float* right;
};
size_t difference_ring_average(Context& context, void* data, size_t numel, DType dtype, const Replicas& replicas,
                               const Codec& codec);

void broadcast(Context& context, void* data, size_t bytes, int root);
void reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root);
void gather(Context& context, const void* input, void* output, size_t bytes, int root);
void scatter(Context& context, const void* input, void* output, size_t bytes, int root);
void barrier(Context& context);

// The same with what travels passed through a codec (f32, f16, bf16; SUM and AVG), and with it the own values: what a
// rank ends with does not depend on where it stands, and broadcast and all_gather leave all ranks bit-equal. numel as
// above, splits in elements. World size 1 moves the data as it is. Each returns the number of blocks of this rank's
// input that held a NaN or Inf.
// all_to_all of rows of `row_numel` elements encodes each by itself; 0: all that goes to a rank is one message.
// With feedback the worker's residual, of all blocks of `input`, is added to them and renewed; the owner encodes
// nothing.
size_t compressed_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype,
                                 ReduceOp op, const Codec& codec, const Feedback& feedback = {});
size_t compressed_all_gather(Context& context, const void* input, void* output, size_t numel, DType dtype,
                             const Codec& codec);
size_t compressed_all_to_all(Context& context, const void* input, const std::vector<size_t>& input_splits, void* output,
                             const std::vector<size_t>& output_splits, DType dtype, const Codec& codec,
                             size_t row_numel = 0);
size_t compressed_broadcast(Context& context, void* data, size_t numel, DType dtype, int root, const Codec& codec);

}  // namespace collectives
}  // namespace bagua

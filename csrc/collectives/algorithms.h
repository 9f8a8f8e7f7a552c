// The algorithms behind collectives.h, for its dispatching functions and for tests that force one of them.
// Each is defined in the file of its name. All run between Communicator::begin and Communicator::end on groups of two
// or more ranks, with arguments that the dispatcher has checked. What the parameters mean is in collectives.h.
#pragma once

#include <string_view>

#include "csrc/collectives/collectives.h"
#include "csrc/collectives/selector.h"
#include "csrc/collectives/shared_buffers.h"
#include "csrc/kernels/fused.h"

namespace bagua::collectives {

// The slots of Context::workspace, by their user. An algorithm may assume that the ones it calls (exchange_buffers,
// barrier) touch only kTables.
enum WorkspaceSlot : int {
  kReceived = 0,       // raw chunks that have arrived and are not yet reduced
  kSentCodes = 1,      // compressed and exchange: what goes to the peers
  kReceivedCodes = 2,  // compressed and exchange: what has come from them
  kResultCodes = 3,    // compressed: reduced chunks of all stripes, by rank
  kAccumulator = 4,    // f32 sums; reduced chunks on their way to a root
  kTables = 5,         // of the host's workspace: addresses and pointers, one per rank
  kTotals = 6,         // compressed: f32 values with their residuals; difference ring: what is encoded
  kGathered = 7,       // compressed: a chunk whose values lie in several segments
};

// Memory of the host for addresses and pointers, until it is asked for again.
inline uint8_t* host_tables(Context& context, size_t bytes) { return context.host_workspace.get(kTables, bytes); }

// Throws InvalidArgument where the operator has no meaning for the type.
void require_defined(std::string_view collective, ReduceOp op, DType dtype);
// Throws InvalidArgument where the codec cannot encode the type, or the operator is not a sum.
void require_compressible(std::string_view collective, const Codec& codec, DType dtype, ReduceOp op = ReduceOp::kSum);
// Throws InvalidArgument where values of the type cannot be averaged by neighbor_average, or not under the codec.
void require_average(DType dtype, const Codec* codec);
// Throws InvalidArgument unless both have an entry per rank and agree about what this rank sends itself.
void require_splits(const GroupView& group, const std::vector<size_t>& input_splits,
                    const std::vector<size_t>& output_splits);

// A residual from its element `begin` on; off where it is off.
kernels::Residual residual_from(const kernels::Residual& residual, size_t begin);
// Encodes one tile of values with their residual, and keeps what the codes do not say. Returns the number of blocks
// that held a NaN or Inf. The CPU computes in `totals` and `decoded`, a tile of f32 each; `decoded` may be `values`,
// whose content is then lost.
size_t encode_with_residual(const Codec& codec, const void* values, DType dtype, const kernels::Residual& residual,
                            size_t numel, uint8_t* bytes, CounterRng rng, float* totals, float* decoded, Stream stream);

// The context among some of the ranks.
Context among(Context& context, const std::vector<int>& members);

// Makes the selector's question; `bytes` is what it counts. Looks at shared memory only where the choice depends on it.
Reach reach_of(const Context& context, size_t bytes, OperationKind kind, DType dtype, ReduceOp op = ReduceOp::kSum);

// Whether neighbours with these weights are all `size` ranks, equally.
bool is_mean_of_all(const std::vector<Neighbor>& neighbors, int size);
// neighbor_average by messages, whatever the weights.
size_t exchange_average(Context& context, void* data, size_t numel, DType dtype, const std::vector<Neighbor>& neighbors,
                        const Codec* codec);

// The raw pointer arithmetic of this folder: element `index` of an array whose items have `item` bytes.
inline uint8_t* at(void* data, size_t index, size_t item) { return static_cast<uint8_t*>(data) + index * item; }
inline const uint8_t* at(const void* data, size_t index, size_t item) {
  return static_cast<const uint8_t*>(data) + index * item;
}

void recursive_doubling_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
void ring_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
void two_shot_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
size_t compressed_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, const Codec& codec,
                             const Feedback& feedback = {}, const InputSegments& segments = {});
// Need GroupView::all_share_memory(). `direct` falls back to `staged` where some rank's buffer is ordinary memory.
void direct_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
void staged_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
// The size of the staging that every rank offers: it depends on the group alone, so that a group's staging block hardly
// ever moves.
size_t staging_bytes(const GroupView& group);
// staged_all_reduce once the staging blocks are known.
void staged_all_reduce_in(Context& context, const SharedBuffers& shared, void* data, size_t numel, DType dtype,
                          ReduceOp op);

void stripes_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op);
void ring_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op);
void pairwise_all_gather(Context& context, const void* input, void* output, size_t bytes);
void ring_all_gather(Context& context, const void* input, void* output, size_t bytes);
void tree_broadcast(Context& context, void* data, size_t bytes, int root);
void chain_broadcast(Context& context, void* data, size_t bytes, int root);
void tree_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root);
void stripes_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root);

// Need GroupView::has_native(). native.cc
void native_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op);
void native_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op);
void native_all_gather(Context& context, const void* input, void* output, size_t bytes);
void native_broadcast(Context& context, void* data, size_t bytes, int root);
void native_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root);

// Need GroupView::all_share_memory(). False on all ranks, with nothing done, where a buffer that the peers would
// have to read is ordinary memory.
bool direct_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op, int root);
bool direct_reduce_scatter(Context& context, const void* input, void* output, size_t numel, DType dtype, ReduceOp op);
bool direct_all_gather(Context& context, const void* input, void* output, size_t bytes);
bool direct_broadcast(Context& context, void* data, size_t bytes, int root);

}  // namespace bagua::collectives

// Staged all_reduce: ranks of one host whose tensors are ordinary memory.
//
// The tensor moves chunk by chunk through slots of shared staging memory, small enough to stay in cache. In a
// chunk, rank j owns stripe j. Iteration k of every rank: copy the others' stripes of chunk k into the own
// slot; reduce the own stripe of chunk k-lag from the own data and the peers' slots, into the own data and
// the own slot; copy the peers' stripes of chunk k-2*lag out of their slots; tell every rank "I have done k"
// (a note). An iteration begins when all peers have done iteration k-lag. One note per peer and chunk; bytes
// through memory per rank: B (n-1)/n in, B read, B written.
//
// Why 2*lag slots suffice: chunk k takes the slot of chunk k-2*lag. Of that, the peers last read the copied
// stripes in their iteration k-lag, which this rank has waited for, and the reduced stripe in their iteration
// k: it is overwritten (by the reduction of chunk k) only in iteration k+lag, which waits for that.
#include <algorithm>
#include <cstring>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"
#include "csrc/kernels/reduce.h"

namespace bagua::collectives {
namespace {

constexpr size_t kLag = kStagedLag;
constexpr size_t kNumSlots = 2 * kLag;

// Stripes are whole cache lines, so a chunk's stripes may take one line each more than the chunk.
size_t slot_bytes(size_t size) { return kMaxStagedChunkBytes + size * 64; }

class StagedAllReduce {
 public:
  StagedAllReduce(Context& context, const SharedBuffers& shared, void* data, size_t numel, DType dtype, ReduceOp op)
      : context_(context),
        shared_(shared),
        data_(data),
        numel_(numel),
        dtype_(dtype),
        op_(op),
        item_(item_bytes(dtype)),
        size_(static_cast<size_t>(context.group.size())),
        rank_(static_cast<size_t>(context.group.rank())),
        chunks_(staged_chunks(numel, item_)),
        stripe_stride_(partition(chunks_.numel, size_, 0, 64 / item_).numel),
        notes_(context.group, (kLag + 1) * 2 * size_) {}

  void run() {
    const size_t last_note = chunks_.count + kLag;
    for (size_t k = 0; k < chunks_.count + 2 * kLag; ++k) {
      if (k >= kLag) wait_notes(k - kLag);
      if (k < chunks_.count) copy_in(k);
      if (k >= kLag && k - kLag < chunks_.count) reduce(k - kLag);
      if (k >= 2 * kLag) copy_out(k - 2 * kLag);
      if (k < last_note) post_notes(k);
    }
    count_moved();
    barrier(context_);
  }

 private:
  Range stripe(size_t k, size_t owner) const {
    // Cut as a full chunk even when this is the short last one: a rank's stripe then lies at the same offset of
    // every slot, so that copying chunk k in never touches the reduced stripe of chunk k-2*lag, which peers may
    // still be reading.
    const Range chunk = chunk_of({0, numel_}, chunks_.numel, k);
    const Range within = partition(chunks_.numel, size_, owner, 64 / item_);
    const size_t begin = std::min(within.begin, chunk.numel);
    return {chunk.begin + begin, std::min(within.numel, chunk.numel - begin)};
  }
  // The offset of the stripe of `owner` in a rank's slot for chunk k.
  uint8_t* staged(size_t k, size_t rank, size_t owner) const {
    return shared_.at[rank] + k % kNumSlots * slot_bytes(size_) + owner * stripe_stride_ * item_;
  }

  // The peers read the values of every stripe but the own here; of the own one they read the result.
  void count_moved() const {
    size_t mine = 0;
    for (size_t k = 0; k < chunks_.count; ++k) mine += stripe(k, rank_).numel;
    const uint64_t moved = (numel_ - mine + mine * (size_ - 1)) * item_;
    context_.group.count_moved(moved, moved);
  }

  void copy_in(size_t k) const {
    for (size_t owner = 0; owner < size_; ++owner) {
      const Range range = stripe(k, owner);
      if (owner == rank_ || range.numel == 0) continue;
      std::memcpy(staged(k, rank_, owner), at(data_, range.begin, item_), range.numel * item_);
    }
  }

  void reduce(size_t k) const {
    const Range mine = stripe(k, rank_);
    void* own = at(data_, mine.begin, item_);
    for (size_t r = 0; r < size_; ++r) shared_.sources[r] = r == rank_ ? own : staged(k, r, rank_);
    void* destinations[2] = {own, staged(k, rank_, rank_)};
    kernels::reduce_many(op_, dtype_, shared_.sources, context_.group.size(), destinations, 2, mine.numel,
                         context_.stream);
  }

  void copy_out(size_t k) const {
    for (size_t owner = 0; owner < size_; ++owner) {
      const Range range = stripe(k, owner);
      if (owner == rank_ || range.numel == 0) continue;
      std::memcpy(at(data_, range.begin, item_), staged(k, owner, owner), range.numel * item_);
    }
  }

  size_t note_slot(size_t k) const { return k % (kLag + 1) * 2 * size_; }

  void post_notes(size_t k) {
    for (size_t step = 1; step < size_; ++step) {
      const size_t peer = (rank_ + step) % size_;
      notes_.recv_note(note_slot(k) + peer, static_cast<int>(peer));
      notes_.send_note(note_slot(k) + size_ + peer, static_cast<int>(peer));
    }
  }
  void wait_notes(size_t k) { notes_.wait_range(note_slot(k), note_slot(k) + 2 * size_); }

  Context& context_;
  const SharedBuffers& shared_;
  void* const data_;
  const size_t numel_;
  const DType dtype_;
  const ReduceOp op_;
  const size_t item_;
  const size_t size_;
  const size_t rank_;
  const Chunks chunks_;
  const size_t stripe_stride_;  // elements
  PostedRequests notes_;
};

}  // namespace

size_t staging_bytes(const GroupView& group) { return kNumSlots * slot_bytes(static_cast<size_t>(group.size())); }

void staged_all_reduce_in(Context& context, const SharedBuffers& shared, void* data, size_t numel, DType dtype,
                          ReduceOp op) {
  const EventSpan span(context.events, EventKind::kReduce, numel * item_bytes(dtype));
  StagedAllReduce(context, shared, data, numel, dtype, op).run();
}

void staged_all_reduce(Context& context, void* data, size_t numel, DType dtype, ReduceOp op) {
  if (numel == 0) return;
  const size_t bytes = staging_bytes(context.group);
  const SharedBuffers shared = exchange_buffers(context, context.group.staging(bytes), bytes, nullptr, 0);
  if (shared.sharing != Sharing::kBuffers) {
    throw Error(ErrorKind::kInternal, "the staging memory of a communicator does not lie in a shared segment");
  }
  staged_all_reduce_in(context, shared, data, numel, dtype, op);
}

}  // namespace bagua::collectives

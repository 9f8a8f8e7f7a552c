// Compressed broadcast: a chain of codes.
//
// The root encodes chunk by chunk; each rank passes the codes on to the next one as they are (one quantisation,
// however long the chain) and decodes them, the root too, so that all ranks end bit-equal. n-2 + chunks steps, C
// bytes sent per rank, C the codes of the tensor. Workspace: kChainLookahead + 1 chunks of codes.
#include <algorithm>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/chunking.h"
#include "csrc/collectives/posted_requests.h"
#include "csrc/collectives/selector.h"

namespace bagua::collectives {
namespace {

constexpr size_t kWindow = kChainLookahead + 1;

class CompressedChain {
 public:
  CompressedChain(Context& context, void* data, size_t numel, DType dtype, int root, const Codec& codec)
      : context_(context),
        codec_(codec),
        data_(data),
        numel_(numel),
        dtype_(dtype),
        size_(context.group.size()),
        position_((context.group.rank() - root + size_) % size_),
        chunks_(codec_chain_chunks(numel, codec.block_numel(), context.chunk_scale())),
        chunk_bytes_(codec.wire_bytes(chunks_.numel, dtype)),
        codes_(context.workspace.get(kReceivedCodes, std::min(kWindow, chunks_.count) * chunk_bytes_)),
        requests_(context.group, 2 * kWindow) {}

  size_t run() {
    for (size_t k = 0; k < chunks_.count + kChainLookahead; ++k) {
      if (k < chunks_.count) obtain(k);
      if (k >= kChainLookahead) pass_on(k - kChainLookahead);
    }
    requests_.wait_all();
    return num_nonfinite_blocks_;
  }

 private:
  Range chunk(size_t k) const { return chunk_of({0, numel_}, chunks_.numel, k); }
  size_t wire_bytes(size_t k) const { return codec_.wire_bytes(chunk(k).numel, dtype_); }
  uint8_t* codes(size_t k) const { return codes_ + k % kWindow * chunk_bytes_; }
  void* values(size_t k) const { return at(data_, chunk(k).begin, item_bytes(dtype_)); }
  static size_t arriving(size_t k) { return 2 * (k % kWindow); }
  static size_t leaving(size_t k) { return 2 * (k % kWindow) + 1; }

  void obtain(size_t k) {
    requests_.wait(leaving(k));  // of the chunk that had this slot
    if (position_ > 0) {
      requests_.recv(arriving(k), (context_.group.rank() + size_ - 1) % size_, codes(k), wire_bytes(k));
      return;
    }
    const EventSpan span(context_.events, EventKind::kEncode, chunk(k).numel * item_bytes(dtype_));
    num_nonfinite_blocks_ +=
        codec_.encode(values(k), dtype_, chunk(k).numel, codes(k), {context_.rng_key, chunk(k).begin}, context_.stream);
  }

  void pass_on(size_t k) {
    {
      const EventSpan span(context_.events, EventKind::kWire, position_ > 0 ? wire_bytes(k) : 0);
      requests_.wait(arriving(k));
    }
    if (position_ < size_ - 1) {
      requests_.send(leaving(k), (context_.group.rank() + 1) % size_, codes(k), wire_bytes(k));
    }
    const EventSpan span(context_.events, EventKind::kDecode, wire_bytes(k));
    codec_.decode(codes(k), dtype_, chunk(k).numel, values(k), context_.stream);
  }

  Context& context_;
  const Codec& codec_;
  void* const data_;
  const size_t numel_;
  const DType dtype_;
  const int size_;
  const int position_;  // in the chain; the root is at 0
  const Chunks chunks_;
  const size_t chunk_bytes_;
  uint8_t* const codes_;
  size_t num_nonfinite_blocks_ = 0;
  PostedRequests requests_;
};

}  // namespace

size_t compressed_broadcast(Context& context, void* data, size_t numel, DType dtype, int root, const Codec& codec) {
  require_compressible("broadcast", codec, dtype);
  if (context.group.size() == 1 || numel == 0) return 0;
  return CompressedChain(context, data, numel, dtype, root, codec).run();
}

}  // namespace bagua::collectives

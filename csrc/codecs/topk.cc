// Codec "topk": of each block of 2048 elements the k of largest magnitude (option k), as f32 values and uint16 indices;
// the others decode to 0. With chunk=4096 blocks are of 4096, indices take 12 bits, and values 32 or 2 (option bits).
// For error feedback, which makes up for what it loses. The selection is in csrc/kernels/topk.h, the chunks are in
// csrc/kernels/topk_chunk.h.
#include "csrc/kernels/topk.h"

#include <bit>
#include <string>

#include "csrc/codecs/block_codec.h"
#include "csrc/common/error.h"
#include "csrc/kernels/topk_chunk.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("topk", [](CodecOptions& options) {
  const int chunk = options.one_of("chunk", {kernels::kBlockNumel, kernels::kTopkChunkNumel});
  const int k = options.one_of("k", {32, 8, 16, 64, 128, 256});
  const bool has_2_bits = options.one_of("bits", {32, 2}) == 2;
  const bool is_dct = options.one_of("dct", {0, 1}) == 1;
  const int variant = std::countr_zero(static_cast<unsigned>(k)) - 3;  // of k 8 is 0, 256 is 5
  if (chunk == static_cast<int>(kernels::kTopkChunkNumel)) {
    const kernels::TopkChunk of_chunk{k, has_2_bits, is_dct};
    return std::make_unique<BlockCodec>("topk", 6 + 4 * variant + 2 * has_2_bits + is_dct, kernels::kTopkChunk,
                                        of_chunk.option(), kernels::topk_chunk_wire_bytes, kernels::kTopkChunkNumel);
  }
  if (has_2_bits || is_dct) {
    throw Error(ErrorKind::kInvalidArgument, std::string("codec \"topk\": ") + (has_2_bits ? "bits=2" : "dct=1") +
                                                 " needs chunk=4096; give that too");
  }
  return std::make_unique<BlockCodec>("topk", variant, kernels::kTopk, k, kernels::topk_wire_bytes);
});

}  // namespace
}  // namespace bagua

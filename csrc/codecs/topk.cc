// Codec "topk": of each block of 2048 elements the k of largest magnitude (option k), as f32 values and uint16 indices;
// the others decode to 0. For error feedback, which makes up for what it loses. The selection is in
// csrc/kernels/topk.h.
#include "csrc/kernels/topk.h"

#include <bit>

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("topk", [](CodecOptions& options) {
  const int k = options.one_of("k", {32, 8, 16, 64, 128, 256});
  return std::make_unique<BlockCodec>("topk", std::countr_zero(static_cast<unsigned>(k)) - 3,  // 8 is 0, 256 is 5
                                      kernels::kTopk, k, kernels::topk_wire_bytes);
});

}  // namespace
}  // namespace bagua

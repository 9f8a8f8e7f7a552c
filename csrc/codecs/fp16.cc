// Codec "fp16": two bytes per element, IEEE half, rounded to nearest even. Error at most half an ulp of
// f16 up to 65504; beyond, values become Inf, as in a cast.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/half_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("fp16", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("fp16", 0, kernels::kHalf, static_cast<int>(DType::kF16),
                                      kernels::half_wire_bytes, 1);
});

}  // namespace
}  // namespace bagua

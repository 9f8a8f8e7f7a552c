// Codec "bf16": two bytes per element, the upper half of an f32, rounded to nearest even. Error at most
// half an ulp of bf16; the range is f32's, so only the last half ulp below its end becomes Inf.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/half_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("bf16", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("bf16", 0, kernels::kHalf, static_cast<int>(DType::kBF16),
                                      kernels::half_wire_bytes, 1);
});

}  // namespace
}  // namespace bagua

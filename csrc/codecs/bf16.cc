// Codec "bf16": two bytes per element, the upper half of an f32, rounded to nearest even. Error at most
// half an ulp of bf16; the range is f32's, so only the last half ulp below its end saturates (half_codec.h).
#include "csrc/codecs/half_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered =
    register_codec("bf16", [](CodecOptions&) { return std::make_unique<HalfCodec>("bf16", DType::kBF16); });

}  // namespace
}  // namespace bagua

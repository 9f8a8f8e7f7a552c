// Codec "fp16": two bytes per element, IEEE half, rounded to nearest even. Error at most half an ulp of
// f16 up to 65504; beyond, values saturate at +-65504 (half_codec.h).
#include "csrc/codecs/half_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered =
    register_codec("fp16", [](CodecOptions&) { return std::make_unique<HalfCodec>("fp16", DType::kF16); });

}  // namespace
}  // namespace bagua

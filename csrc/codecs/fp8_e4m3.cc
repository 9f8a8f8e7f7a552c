// Codec "fp8_e4m3": blocks of 2048 elements, each the f32 norm (the largest magnitude) and OCP's E4M3 per element, of
// which 448 stands for the norm. The arithmetic is in csrc/kernels/minifloat.h.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/minifloat.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("fp8_e4m3", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("fp8_e4m3", 0, kernels::kMinifloat, static_cast<int>(kernels::Minifloat::kE4M3),
                                      kernels::minifloat_wire_bytes);
});

}  // namespace
}  // namespace bagua

// Codec "fp8_e5m2": blocks of 2048 elements, each the f32 norm (the largest magnitude) and OCP's E5M2 per element, of
// which 57344 stands for the norm. The arithmetic is in csrc/kernels/minifloat.h.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/minifloat.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("fp8_e5m2", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("fp8_e5m2", 0, kernels::kMinifloat, static_cast<int>(kernels::Minifloat::kE5M2),
                                      kernels::minifloat_wire_bytes);
});

}  // namespace
}  // namespace bagua

// Codec "fp4_e2m1": blocks of 2048 elements, each the f32 norm (the largest magnitude) and 4 bits per element:
// OCP's E2M1, of which 6 stands for the norm. The arithmetic is in csrc/kernels/minifloat.h.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/minifloat.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("fp4_e2m1", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("fp4_e2m1", 0, kernels::kMinifloat, static_cast<int>(kernels::Minifloat::kE2M1),
                                      kernels::minifloat_wire_bytes);
});

}  // namespace
}  // namespace bagua

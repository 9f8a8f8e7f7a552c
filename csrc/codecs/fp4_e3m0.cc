// Codec "fp4_e3m0": blocks of 2048 elements, each the f32 norm (the largest magnitude) and 4 bits per element:
// E3M0, a power of two or 0, of which 16 stands for the norm. The arithmetic is in csrc/kernels/minifloat.h.
#include "csrc/codecs/block_codec.h"
#include "csrc/kernels/minifloat.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("fp4_e3m0", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("fp4_e3m0", 0, kernels::kMinifloat, static_cast<int>(kernels::Minifloat::kE3M0),
                                      kernels::minifloat_wire_bytes);
});

}  // namespace
}  // namespace bagua

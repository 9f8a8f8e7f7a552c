// Codec "onebit": blocks of 2048 elements, each the f32 mean of the magnitudes and a sign per element. For error
// feedback, which makes up for what it loses. The arithmetic is in csrc/kernels/onebit.h.
#include "csrc/kernels/onebit.h"

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("onebit", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("onebit", 0, kernels::kOnebit, 0,
                                      [](size_t numel, int) { return kernels::onebit_wire_bytes(numel); });
});

}  // namespace
}  // namespace bagua

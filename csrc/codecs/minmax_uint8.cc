// Codec "minmax_uint8": blocks of 2048 elements, each f32 min, f32 max and one byte per element; error at
// most (max - min) / 510 within a block, zeros exact. The arithmetic is in csrc/kernels/minmax_uint8.h.
#include "csrc/kernels/minmax_uint8.h"

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("minmax_uint8", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("minmax_uint8", 0, kernels::kMinmaxUint8, 0,
                                      [](size_t numel, int) { return kernels::minmax_uint8_wire_bytes(numel); });
});

}  // namespace
}  // namespace bagua

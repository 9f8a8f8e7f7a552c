// Codec "centroid": blocks of 2048 elements, each the f32 mean and standard deviation and a code of 2 bits per element,
// the nearest of four levels. For error feedback, which makes up for what it loses. The arithmetic is in
// csrc/kernels/centroid.h.
#include "csrc/kernels/centroid.h"

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("centroid", [](CodecOptions&) {
  return std::make_unique<BlockCodec>("centroid", 0, kernels::kCentroid, 0,
                                      [](size_t numel, int) { return kernels::centroid_wire_bytes(numel); });
});

}  // namespace
}  // namespace bagua

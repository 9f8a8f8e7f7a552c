// Codec "qsgd": blocks of 2048 elements, each an f32 norm and a code of 8, 4 or 2 bits per element (option bits),
// rounded at random so that the expected value of what is decoded is what was encoded; error below norm / (2^(bits-1) -
// 1). The arithmetic is in csrc/kernels/qsgd.h.
#include "csrc/kernels/qsgd.h"

#include <bit>

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("qsgd", [](CodecOptions& options) {
  const int bits = options.one_of("bits", {8, 4, 2});
  return std::make_unique<BlockCodec>("qsgd",
                                      3 - std::countr_zero(static_cast<unsigned>(bits)),  // 8 is 0, 2 is 2
                                      kernels::kQsgd, bits, kernels::qsgd_wire_bytes);
});

}  // namespace
}  // namespace bagua

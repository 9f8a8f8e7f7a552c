// Codec "qsgd": blocks of 2048 elements, each an f32 norm and a code of 8, 4 or 2 bits per element (option bits),
// rounded at random so that the expected value of what is decoded is what was encoded; error below norm / (2^(bits-1) -
// 1). The arithmetic is in csrc/kernels/qsgd.h.
#include "csrc/kernels/qsgd.h"

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("qsgd", [](CodecOptions& options) {
  const int bits = options.one_of("bits", {8, 4, 2});
  return std::make_unique<BlockCodec>(
      "qsgd",
      bits == 8   ? 0
      : bits == 4 ? 1
                  : 2,
      BlockKernels{kernels::kQsgdBlockNumel, [bits](size_t numel) { return kernels::qsgd_wire_bytes(numel, bits); },
                   std::bind_front(kernels::qsgd_encode, bits), std::bind_front(kernels::qsgd_decode, bits),
                   std::bind_front(kernels::qsgd_decode_add, bits),
                   std::bind_front(kernels::qsgd_encode_with_residual, bits),
                   std::bind_front(kernels::qsgd_reduce_encode, bits)});
});

}  // namespace
}  // namespace bagua

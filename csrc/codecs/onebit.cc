// Codec "onebit": blocks of 2048 elements, each the f32 mean of the magnitudes and a sign per element. For error
// feedback, which makes up for what it loses. The arithmetic is in csrc/kernels/onebit.h.
#include "csrc/kernels/onebit.h"

#include "csrc/codecs/block_codec.h"

namespace bagua {
namespace {

[[maybe_unused]] const bool registered = register_codec("onebit", [](CodecOptions&) {
  return std::make_unique<BlockCodec>(
      "onebit", 0,
      BlockKernels{kernels::kOnebitBlockNumel, kernels::onebit_wire_bytes, without_rng(kernels::onebit_encode),
                   kernels::onebit_decode, kernels::onebit_decode_add,
                   without_rng(kernels::onebit_encode_with_residual), without_rng(kernels::onebit_reduce_encode)});
});

}  // namespace
}  // namespace bagua

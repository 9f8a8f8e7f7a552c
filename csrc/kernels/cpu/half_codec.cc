// CPU form of the codecs fp16 and bf16 (contract: half_codec.h). The walk over the message is that of the block-wise
// codecs, in pieces of kHalfBlockNumel elements.
#include "csrc/kernels/half_codec.h"

#include "csrc/kernels/arithmetic/half_codec.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace half_codec {  // a name, because the tests compile the kernels of several files into one
namespace {

// Returns how many codes will not be finite.
BAGUA_MULTIVERSION uint32_t canonicalize(const float* __restrict source, float* __restrict block, size_t numel,
                                         uint32_t overflow) {
  uint32_t num_nonfinite = 0;
  for (size_t i = 0; i < numel; ++i) {
    num_nonfinite += narrows_to_nonfinite(source[i], overflow);
    block[i] = with_canonical_nan(source[i]);
  }
  return num_nonfinite;
}

struct Blocks {
  static constexpr size_t kNumel = kHalfBlockNumel;
  static constexpr float kPadding = 0.0f;
  const DType wire;
  Blocks(int option, CounterRng) : wire(static_cast<DType>(option)) {}

  size_t wire_bytes() const { return kNumel * 2; }
  size_t encoded_numel(size_t numel) const { return numel; }
  size_t decoded_numel(size_t numel) const { return numel; }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    alignas(64) float block[kNumel];
    const uint32_t num_nonfinite = canonicalize(source, block, numel, overflow_of(wire));
    cast(DType::kF32, block, wire, bytes, numel);
    return num_nonfinite;
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    cast(wire, bytes, DType::kF32, destination, numel);
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    cast_add(wire, bytes, destination, numel);
  }
};

void decode(int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream) {
  cast(static_cast<DType>(option), bytes, dtype, destination, numel);
}

}  // namespace
}  // namespace half_codec

const BlockKernels kHalf = [] {
  BlockKernels kernels = kBlockKernels<half_codec::Blocks>;
  kernels.decode = half_codec::decode;
  return kernels;
}();

}  // namespace bagua::kernels::cpu

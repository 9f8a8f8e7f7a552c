// Codec "minmax_uint8": blocks of 2048 elements, each f32 min, f32 max and one byte per element; error at
// most (max - min) / 510 within a block, zeros exact. The arithmetic is in csrc/kernels/minmax_uint8.h.
#include "csrc/kernels/minmax_uint8.h"

#include "csrc/codecs/codec.h"

namespace bagua {
namespace {

class MinmaxUint8 final : public Codec {
 public:
  std::string_view name() const override { return "minmax_uint8"; }
  size_t block_numel() const override { return kernels::kMinmaxUint8BlockNumel; }
  size_t wire_bytes(size_t numel, DType) const override { return kernels::minmax_uint8_wire_bytes(numel); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng,
                Stream stream) const override {
    uint64_t num_nonfinite_blocks = 0;
    kernels::minmax_uint8_encode(dtype, source, numel, bytes, stream.is_cpu() ? &num_nonfinite_blocks : nullptr,
                                 stream);
    return num_nonfinite_blocks;
  }

  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels::minmax_uint8_decode(dtype, bytes, numel, destination, stream);
  }

  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels::minmax_uint8_decode_add(bytes, numel, accumulator, stream);
  }
};

[[maybe_unused]] const bool registered =
    register_codec("minmax_uint8", [](CodecOptions&) { return std::make_unique<MinmaxUint8>(); });

}  // namespace
}  // namespace bagua

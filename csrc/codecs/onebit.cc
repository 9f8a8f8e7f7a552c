// Codec "onebit": blocks of 2048 elements, each the f32 mean of the magnitudes and a sign per element. For error
// feedback, which makes up for what it loses. The arithmetic is in csrc/kernels/onebit.h.
#include "csrc/kernels/onebit.h"

#include "csrc/codecs/codec.h"

namespace bagua {
namespace {

class Onebit final : public Codec {
 public:
  std::string_view name() const override { return "onebit"; }
  size_t block_numel() const override { return kernels::kOnebitBlockNumel; }
  size_t wire_bytes(size_t numel, DType) const override { return kernels::onebit_wire_bytes(numel); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng,
                Stream stream) const override {
    uint64_t num_nonfinite_blocks = 0;
    kernels::onebit_encode(dtype, source, numel, bytes, stream.is_cpu() ? &num_nonfinite_blocks : nullptr, stream);
    return num_nonfinite_blocks;
  }

  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels::onebit_decode(dtype, bytes, numel, destination, stream);
  }

  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels::onebit_decode_add(bytes, numel, accumulator, stream);
  }
};

[[maybe_unused]] const bool registered =
    register_codec("onebit", [](CodecOptions&) { return std::make_unique<Onebit>(); });

}  // namespace
}  // namespace bagua

// Codec "qsgd": blocks of 2048 elements, each an f32 norm and a code of 8, 4 or 2 bits per element (option bits),
// rounded at random so that the expected value of what is decoded is what was encoded; error below norm / (2^(bits-1) -
// 1). The arithmetic is in csrc/kernels/qsgd.h.
#include "csrc/kernels/qsgd.h"

#include "csrc/codecs/codec.h"

namespace bagua {
namespace {

class Qsgd final : public Codec {
 public:
  explicit Qsgd(int bits) : bits_(bits) {}

  std::string_view name() const override { return "qsgd"; }
  int variant() const override { return bits_ == 8 ? 0 : bits_ == 4 ? 1 : 2; }
  size_t block_numel() const override { return kernels::kQsgdBlockNumel; }
  size_t wire_bytes(size_t numel, DType) const override { return kernels::qsgd_wire_bytes(numel, bits_); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng rng,
                Stream stream) const override {
    uint64_t num_nonfinite_blocks = 0;
    kernels::qsgd_encode(bits_, dtype, source, numel, bytes, rng, stream.is_cpu() ? &num_nonfinite_blocks : nullptr,
                         stream);
    return num_nonfinite_blocks;
  }

  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels::qsgd_decode(bits_, dtype, bytes, numel, destination, stream);
  }

  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels::qsgd_decode_add(bits_, bytes, numel, accumulator, stream);
  }

 private:
  const int bits_;
};

[[maybe_unused]] const bool registered = register_codec("qsgd", [](CodecOptions& options) {
  return std::make_unique<Qsgd>(options.one_of("bits", {8, 4, 2}));
});

}  // namespace
}  // namespace bagua

// Codec "topk": of each block of 2048 elements the k of largest magnitude (option k), as f32 values and uint16 indices;
// the others decode to 0. For error feedback, which makes up for what it loses. The selection is in
// csrc/kernels/topk.h.
#include "csrc/kernels/topk.h"

#include <bit>

#include "csrc/codecs/codec.h"

namespace bagua {
namespace {

class Topk final : public Codec {
 public:
  explicit Topk(int k) : k_(k) {}

  std::string_view name() const override { return "topk"; }
  int variant() const override { return std::countr_zero(static_cast<unsigned>(k_)) - 3; }  // 8 is 0, 256 is 5
  size_t block_numel() const override { return kernels::kTopkBlockNumel; }
  size_t wire_bytes(size_t numel, DType) const override { return kernels::topk_wire_bytes(numel, k_); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng,
                Stream stream) const override {
    uint64_t num_nonfinite_blocks = 0;
    kernels::topk_encode(k_, dtype, source, numel, bytes, stream.is_cpu() ? &num_nonfinite_blocks : nullptr, stream);
    return num_nonfinite_blocks;
  }

  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels::topk_decode(k_, dtype, bytes, numel, destination, stream);
  }

  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels::topk_decode_add(k_, bytes, numel, accumulator, stream);
  }

 private:
  const int k_;
};

[[maybe_unused]] const bool registered = register_codec("topk", [](CodecOptions& options) {
  return std::make_unique<Topk>(options.one_of("k", {32, 8, 16, 64, 128, 256}));
});

}  // namespace
}  // namespace bagua

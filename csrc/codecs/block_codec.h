// BlockCodec: a codec whose arithmetic is in csrc/kernels. The file of each names its kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <tuple>
#include <utility>

#include "csrc/codecs/codec.h"

namespace bagua {

// Of one codec with given options; the contracts are in its header in csrc/kernels.
struct BlockKernels {
  size_t block_numel;
  std::function<size_t(size_t numel)> wire_bytes;
  std::function<void(DType, const void* source, size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite,
                     Stream)>
      encode;
  std::function<void(DType, const uint8_t* bytes, size_t numel, void* destination, Stream)> decode;
  std::function<void(const uint8_t* bytes, size_t numel, float* accumulator, Stream)> decode_add;
  std::function<void(DType, const void* source, const kernels::Residual&, size_t numel, uint8_t* bytes, CounterRng,
                     uint64_t* num_nonfinite, Stream)>
      encode_with_residual;
  std::function<void(const kernels::Contributions&, double factor, const kernels::Residual&, size_t numel,
                     uint8_t* bytes, CounterRng, uint64_t* num_nonfinite, Stream)>
      reduce_encode;
};

// For the encoders of a codec that does not round at random: they take the same, but no CounterRng.
template <typename Encode>
auto without_rng(Encode encode) {
  return [encode](const auto&... arguments) {
    constexpr size_t kNumTaken = sizeof...(arguments) - 1, kRng = kNumTaken - 2;  // behind it the count and the stream
    const auto all = std::tie(arguments...);
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      encode(std::get<(kIndex < kRng ? kIndex : kIndex + 1)>(all)...);
    }
    (std::make_index_sequence<kNumTaken>{});
  };
}

class BlockCodec final : public Codec {
 public:
  // `name` is a literal.
  BlockCodec(std::string_view name, int variant, BlockKernels kernels)
      : name_(name), variant_(variant), kernels_(std::move(kernels)) {}

  std::string_view name() const override { return name_; }
  int variant() const override { return variant_; }
  size_t block_numel() const override { return kernels_.block_numel; }
  size_t wire_bytes(size_t numel, DType) const override { return kernels_.wire_bytes(numel); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng rng,
                Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.encode(dtype, source, numel, bytes, rng, stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }
  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels_.decode(dtype, bytes, numel, destination, stream);
  }
  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels_.decode_add(bytes, numel, accumulator, stream);
  }
  size_t encode_with_residual(const void* source, DType dtype, const kernels::Residual& residual, size_t numel,
                              uint8_t* bytes, CounterRng rng, Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.encode_with_residual(dtype, source, residual, numel, bytes, rng,
                                  stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }
  size_t reduce_encode(const kernels::Contributions& contributions, DType, double factor,
                       const kernels::Residual& residual, size_t numel, uint8_t* bytes, CounterRng rng,
                       Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.reduce_encode(contributions, factor, residual, numel, bytes, rng,
                           stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }

 private:
  const std::string_view name_;
  const int variant_;
  const BlockKernels kernels_;
};

}  // namespace bagua

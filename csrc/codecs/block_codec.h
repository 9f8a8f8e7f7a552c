// BlockCodec: a codec whose arithmetic is in csrc/kernels. The file of each names its kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
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
};

// For the encoder of a codec that does not round at random.
template <typename Encode>
auto without_rng(Encode encode) {
  return [encode](DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite,
                  Stream stream) { encode(dtype, source, numel, bytes, num_nonfinite, stream); };
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

 private:
  const std::string_view name_;
  const int variant_;
  const BlockKernels kernels_;
};

}  // namespace bagua

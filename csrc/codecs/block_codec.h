// BlockCodec: a codec whose arithmetic is in csrc/kernels. The file of each names its kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "csrc/codecs/codec.h"
#include "csrc/kernels/block_kernels.h"

namespace bagua {

class BlockCodec final : public Codec {
 public:
  using WireBytes = size_t (*)(size_t numel, int option);
  // `name` is a literal, `option` what the kernels take for theirs.
  BlockCodec(std::string_view name, int variant, const kernels::BlockKernels& kernels, int option, WireBytes wire_bytes,
             size_t block_numel = kernels::kBlockNumel)
      : name_(name),
        variant_(variant),
        kernels_(kernels),
        option_(option),
        wire_bytes_(wire_bytes),
        block_numel_(block_numel) {}

  std::string_view name() const override { return name_; }
  int variant() const override { return variant_; }
  size_t block_numel() const override { return block_numel_; }
  size_t wire_bytes(size_t numel, DType) const override { return wire_bytes_(numel, option_); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng rng,
                Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.encode(option_, dtype, source, numel, bytes, rng, stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }
  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    kernels_.decode(option_, dtype, bytes, numel, destination, stream);
  }
  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels_.decode_add(option_, bytes, numel, accumulator, stream);
  }
  size_t encode_with_residual(const void* source, DType dtype, const kernels::Residual& residual, size_t numel,
                              uint8_t* bytes, CounterRng rng, Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.encode_with_residual(option_, dtype, source, residual, numel, bytes, rng,
                                  stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }
  size_t reduce_encode(const kernels::Contributions& contributions, DType, double factor,
                       const kernels::Residual& residual, size_t numel, uint8_t* bytes, CounterRng rng,
                       Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels_.reduce_encode(option_, contributions, factor, residual, numel, bytes, rng,
                           stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }

 private:
  const std::string_view name_;
  const int variant_;
  const kernels::BlockKernels& kernels_;
  const int option_;
  const WireBytes wire_bytes_;
  const size_t block_numel_;
};

}  // namespace bagua

// What the codecs fp16 and bf16 share: the message is the elements themselves, rounded to a 16-bit float.
// A block is one element, so a NaN or Inf concerns no other.
//
// Finite stays finite: a value beyond the largest finite number of the wire type is sent as that number,
// where a plain conversion would make it Inf. The same holds on the way back, where bf16 may exceed the
// range of f16. NaN and Inf both arrive as NaN.
#pragma once

#include "csrc/codecs/codec.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/saturating_cast.h"

namespace bagua {

class HalfCodec final : public Codec {
 public:
  // `name` is a literal.
  HalfCodec(std::string_view name, DType wire) : name_(name), wire_(wire) {}

  std::string_view name() const override { return name_; }
  size_t block_numel() const override { return 1; }
  size_t wire_bytes(size_t numel, DType) const override { return numel * item_bytes(wire_); }

  size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng,
                Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels::saturating_cast(dtype, source, wire_, bytes, numel, stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }

  void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const override {
    if (dtype == DType::kF32 || dtype == wire_) return kernels::cast(wire_, bytes, dtype, destination, numel, stream);
    kernels::saturating_cast(wire_, bytes, dtype, destination, numel, nullptr, stream);
  }

  void decode_add(const uint8_t* bytes, DType, size_t numel, float* accumulator, Stream stream) const override {
    kernels::cast_add(wire_, bytes, accumulator, numel, stream);
  }

  size_t encode_with_residual(const void* source, DType dtype, const kernels::Residual& residual, size_t numel,
                              uint8_t* bytes, CounterRng, Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels::saturating_cast_with_residual(dtype, source, residual, wire_, numel, bytes,
                                           stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }

  size_t reduce_encode(const kernels::Contributions& contributions, DType, double factor,
                       const kernels::Residual& residual, size_t numel, uint8_t* bytes, CounterRng,
                       Stream stream) const override {
    uint64_t num_nonfinite = 0;
    kernels::reduce_saturating_cast(contributions, factor, residual, wire_, numel, bytes,
                                    stream.is_cpu() ? &num_nonfinite : nullptr, stream);
    return num_nonfinite;
  }

 private:
  const std::string_view name_;
  const DType wire_;
};

}  // namespace bagua

// CPU form of the saturating conversion (contract: saturating_cast.h): a block of f32 on the stack is
// clamped on its integer image, which also counts what is not finite, and then narrowed.
#include "csrc/kernels/saturating_cast.h"

#include <algorithm>
#include <bit>

#include "csrc/kernels/arithmetic/saturating_cast.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace {

// destination[i] = source[i] clamped to +-largest, or NaN; returns how many were not finite. `source` and
// `destination` may be equal. numel is at most a block, so the count fits the lanes of f32.
BAGUA_MULTIVERSION uint32_t clamp_block(const float* source, float* destination, size_t numel, uint32_t largest) {
  uint32_t num_nonfinite = 0;
  BAGUA_ELEMENTWISE
  for (size_t i = 0; i < numel; ++i) {
    num_nonfinite += is_nonfinite(source[i]);
    destination[i] = clamp_finite(source[i], largest);
  }
  return num_nonfinite;
}

// The fused kernels walk over pieces of kHalfBlockNumel elements: a block of these codecs is one.
struct Elements {
  static constexpr size_t kNumel = kHalfBlockNumel;
  const DType to;

  size_t wire_bytes() const { return kNumel * item_bytes(to); }
};

// `totals` does not hold the residual yet. Returns how many elements were not finite.
uint64_t encode_totals(DType to, const Residual& residual, size_t begin, size_t numel, float* totals, uint8_t* bytes) {
  const Residual part = residual.is_on() ? residual_from(residual, begin) : Residual{};
  add_residual(part, numel, totals);
  uint64_t num_nonfinite = 0;
  saturating_cast(DType::kF32, totals, to, bytes, numel, &num_nonfinite);
  if (!residual.is_on()) return num_nonfinite;
  alignas(64) float decoded[kHalfBlockNumel];
  cast(to, bytes, DType::kF32, decoded, numel);
  subtract(totals, decoded, numel);
  cast(DType::kF32, totals, part.dtype, part.out, numel);
  return num_nonfinite;
}

}  // namespace

void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel,
                     uint64_t* num_nonfinite) {
  const auto widen = from == DType::kF16 ? widen_f16 : widen_bf16;
  const auto narrow = to == DType::kF16 ? narrow_f16 : narrow_bf16;
  const uint32_t largest = largest_of(to);
  unaligned_u16* narrowed = static_cast<unaligned_u16*>(destination);
  alignas(64) float block[kHalfBlockNumel];
  uint64_t total = 0;
  for (size_t begin = 0; begin < numel; begin += kHalfBlockNumel) {
    const size_t count = std::min(kHalfBlockNumel, numel - begin);
    const float* values = block;
    if (from == DType::kF32) {
      values = static_cast<const float*>(source) + begin;
    } else {
      widen(static_cast<const unaligned_u16*>(source) + begin, block, count);
    }
    total += clamp_block(values, block, count, largest);
    narrow(block, narrowed + begin, count);
  }
  if (num_nonfinite != nullptr) *num_nonfinite += total;
}

void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite) {
  uint64_t total = 0;
  alignas(64) float totals[kHalfBlockNumel];
  for_each_block(Elements{to}, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    cast(from, static_cast<const uint8_t*>(source) + begin * item_bytes(from), DType::kF32, totals, count);
    total += encode_totals(to, residual, begin, count, totals, bytes + offset_bytes);
  });
  if (num_nonfinite != nullptr) *num_nonfinite += total;
}

void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite) {
  uint64_t total = 0;
  alignas(64) float sums[kHalfBlockNumel];
  for_each_block(Elements{to}, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    std::fill_n(sums, count, 0.0f);
    for (int rank = 0; rank < contributions.count; ++rank) {
      cast_add(to, contributions.codes + static_cast<size_t>(rank) * contributions.stride + offset_bytes, sums, count);
    }
    if (factor != 1.0) scale(DType::kF32, sums, factor, count);
    total += encode_totals(to, residual, begin, count, sums, bytes + offset_bytes);
  });
  if (num_nonfinite != nullptr) *num_nonfinite += total;
}

}  // namespace bagua::kernels::cpu

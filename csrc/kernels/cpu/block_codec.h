// The part that the block-wise codecs share on the CPU: the walk over the blocks of a message, and the f32 block on the
// stack through which f16, bf16 and short blocks go. What happens within a block is in the file of each codec, as a
// `Blocks`:
//
//   static constexpr size_t kNumel             elements of a whole block
//   static constexpr float kPadding            what encode() is given behind the elements of a short block
//   Blocks(int option, CounterRng)             see block_kernels.h
//   size_t wire_bytes() const                  of a whole block
//   size_t encoded_numel(size_t numel) const   how many elements encode() reads of a block of `numel`, no fewer
//   size_t decoded_numel(size_t numel) const   how many decode() and decode_add() write of it, no fewer
//   size_t encode(const float* source, size_t begin, size_t numel, uint8_t* bytes) const
//                                              returns how many blocks are not finite, 0 or 1; `begin` is the
//                                              message's element at which the block begins
//   void decode(const uint8_t* bytes, size_t numel, float* destination) const
//   void decode_add(const uint8_t* bytes, size_t numel, float* destination) const
//   static constexpr bool kSaturates           if there: decoded values may lie beyond the range of what was encoded,
//   and
//                                              are clamped to that of the type they are stored as
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "csrc/common/dtype.h"
#include "csrc/kernels/arithmetic/saturate.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The use that a decoder makes of a value.
enum class Store { kAssign, kAdd };

template <Store kStore>
BAGUA_INLINE void store(float value, float& destination) {
  if constexpr (kStore == Store::kAssign) destination = value;
  if constexpr (kStore == Store::kAdd) destination += value;
}

template <Store kStore>
BAGUA_INLINE void store_all(float value, size_t numel, float* __restrict destination) {
  for (size_t i = 0; i < numel; ++i) store<kStore>(value, destination[i]);
}

// Calls body(first element, elements, where the block's bytes begin) for every block.
template <typename Blocks, typename Body>
void for_each_block(const Blocks& blocks, size_t numel, Body body) {
  for (size_t begin = 0; begin < numel; begin += Blocks::kNumel) {
    body(begin, std::min(Blocks::kNumel, numel - begin), begin / Blocks::kNumel * blocks.wire_bytes());
  }
}

template <typename Blocks>
void encode_blocks(const Blocks& blocks, DType dtype, const void* source, size_t numel, uint8_t* bytes,
                   uint64_t* num_nonfinite_blocks) {
  uint64_t num_nonfinite = 0;
  alignas(64) float block[Blocks::kNumel];
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    const size_t num_read = blocks.encoded_numel(count);
    const float* values = static_cast<const float*>(source) + begin;
    if (dtype != DType::kF32 || num_read != count) {
      if (dtype == DType::kF32) {
        std::memcpy(block, values, count * sizeof(float));
      } else {
        const auto* halves = static_cast<const unaligned_u16*>(source) + begin;
        dtype == DType::kF16 ? widen_f16(halves, block, count) : widen_bf16(halves, block, count);
      }
      std::fill(block + count, block + num_read, Blocks::kPadding);
      values = block;
    }
    num_nonfinite += blocks.encode(values, begin, count, bytes + offset_bytes);
  });
  if (num_nonfinite_blocks != nullptr) *num_nonfinite_blocks += num_nonfinite;
}

template <typename Blocks>
void decode_blocks(const Blocks& blocks, DType dtype, const uint8_t* bytes, size_t numel, void* destination) {
  alignas(64) float block[Blocks::kNumel];
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    float* values = static_cast<float*>(destination) + begin;
    if (dtype == DType::kF32 && blocks.decoded_numel(count) == count) {
      return blocks.decode(bytes + offset_bytes, count, values);
    }
    blocks.decode(bytes + offset_bytes, count, block);
    if constexpr (requires { Blocks::kSaturates; }) {
      for (size_t i = 0; i < count; ++i) block[i] = saturated(block[i], largest_number(dtype));
    }
    if (dtype == DType::kF32) {
      std::memcpy(values, block, count * sizeof(float));
    } else {
      auto* halves = static_cast<unaligned_u16*>(destination) + begin;
      dtype == DType::kF16 ? narrow_f16(block, halves, count) : narrow_bf16(block, halves, count);
    }
  });
}

template <typename Blocks>
void decode_add_blocks(const Blocks& blocks, const uint8_t* bytes, size_t numel, float* accumulator) {
  alignas(64) float block[Blocks::kNumel];
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    if (blocks.decoded_numel(count) == count) {
      return blocks.decode_add(bytes + offset_bytes, count, accumulator + begin);
    }
    blocks.decode(bytes + offset_bytes, count, block);
    for (size_t i = 0; i < count; ++i) accumulator[begin + i] += block[i];
  });
}

// The part of a residual from element `begin` on, if there is one.
inline Residual residual_from(const Residual& residual, size_t begin) {
  const size_t offset_bytes = begin * item_bytes(residual.dtype);
  const auto* in = static_cast<const uint8_t*>(residual.in);
  return {in == nullptr ? nullptr : in + offset_bytes, static_cast<uint8_t*>(residual.out) + offset_bytes,
          residual.dtype};
}

// values += residual.in; f32 is added as it lies.
inline void add_residual(const Residual& residual, size_t numel, float* values) {
  if (residual.in != nullptr) cast_add(residual.dtype, residual.in, values, numel);
}

// The work of the fused kernels (fused.h) on one block: `totals` has kNumel elements, of which the first `numel` count
// and do not hold the residual yet. Returns what encode() does.
template <typename Blocks>
size_t encode_totals(const Blocks& blocks, const Residual& residual, size_t begin, size_t numel, float* totals,
                     uint8_t* bytes) {
  const Residual part = residual.is_on() ? residual_from(residual, begin) : Residual{};
  add_residual(part, numel, totals);
  std::fill(totals + numel, totals + blocks.encoded_numel(numel), Blocks::kPadding);
  const size_t num_nonfinite = blocks.encode(totals, begin, numel, bytes);
  if (!residual.is_on()) return num_nonfinite;
  alignas(64) float decoded[Blocks::kNumel] = {};  // not for us: GCC does not see that decode() writes all of `numel`
  blocks.decode(bytes, numel, decoded);
  subtract(totals, decoded, numel);
  cast(DType::kF32, totals, part.dtype, part.out, numel);
  return num_nonfinite;
}

template <typename Blocks>
void encode_with_residual_blocks(const Blocks& blocks, DType dtype, const void* source, const Residual& residual,
                                 size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  uint64_t num_nonfinite = 0;
  alignas(64) float totals[Blocks::kNumel];
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    cast(dtype, static_cast<const uint8_t*>(source) + begin * item_bytes(dtype), DType::kF32, totals, count);
    num_nonfinite += encode_totals(blocks, residual, begin, count, totals, bytes + offset_bytes);
  });
  if (num_nonfinite_blocks != nullptr) *num_nonfinite_blocks += num_nonfinite;
}

template <typename Blocks>
void reduce_encode_blocks(const Blocks& blocks, const Contributions& contributions, double factor,
                          const Residual& residual, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  uint64_t num_nonfinite = 0;
  alignas(64) float sums[Blocks::kNumel];
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    std::fill_n(sums, blocks.decoded_numel(count), 0.0f);
    for (int rank = 0; rank < contributions.count; ++rank) {
      blocks.decode_add(contributions.codes + static_cast<size_t>(rank) * contributions.stride + offset_bytes, count,
                        sums);
    }
    if (factor != 1.0) scale(DType::kF32, sums, factor, count);
    num_nonfinite += encode_totals(blocks, residual, begin, count, sums, bytes + offset_bytes);
  });
  if (num_nonfinite_blocks != nullptr) *num_nonfinite_blocks += num_nonfinite;
}

template <typename Blocks>
constexpr BlockKernels kBlockKernels = {
    [](int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
       uint64_t* num_nonfinite_blocks, Stream) {
      encode_blocks(Blocks{option, rng}, dtype, source, numel, bytes, num_nonfinite_blocks);
    },
    [](int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream) {
      decode_blocks(Blocks{option, {}}, dtype, bytes, numel, destination);
    },
    [](int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream) {
      decode_add_blocks(Blocks{option, {}}, bytes, numel, accumulator);
    },
    [](int option, DType dtype, const void* source, const Residual& residual, size_t numel, uint8_t* bytes,
       CounterRng rng, uint64_t* num_nonfinite_blocks, Stream) {
      encode_with_residual_blocks(Blocks{option, rng}, dtype, source, residual, numel, bytes, num_nonfinite_blocks);
    },
    [](int option, const Contributions& contributions, double factor, const Residual& residual, size_t numel,
       uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream) {
      reduce_encode_blocks(Blocks{option, rng}, contributions, factor, residual, numel, bytes, num_nonfinite_blocks);
    },
};

}  // namespace bagua::kernels::cpu

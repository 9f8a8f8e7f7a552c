// CPU form of the sparsifier (contract and selection: topk.h). The search for the threshold is in topk_select.h. f16,
// bf16 and short blocks go through an f32 block on the stack.
#include "csrc/kernels/topk.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/topk_select.h"

namespace bagua::kernels::cpu {
namespace topk {  // a name, because the tests compile the kernels of several files into one
namespace {

// `source` has kBlockNumel elements, of which `k` or more are the block's and those behind them +0, which no other
// element is smaller than. Returns whether the block is finite.
BAGUA_MULTIVERSION bool encode_block(const float* __restrict source, size_t k, uint8_t* __restrict bytes) {
  Keys<kBlockNumel> keys;
  uint16_t indices[kTopkMaxK];
  float values[kTopkMaxK];
  const uint32_t largest = take_upper_keys(source, keys);
  const bool finite = largest < kF32Inf;
  if (finite) {
    list_selected<kBlockNumel>(source, select_largest(source, k, largest, keys), indices);
    for (size_t j = 0; j < k; ++j) values[j] = source[indices[j]];
  } else {
    for (size_t j = 0; j < k; ++j) {
      indices[j] = static_cast<uint16_t>(j);
      values[j] = kNan;
    }
  }
  std::memcpy(bytes, values, k * sizeof(float));
  std::memcpy(bytes + k * sizeof(float), indices, k * sizeof(uint16_t));
  return finite;
}

BAGUA_INLINE float load_value(const uint8_t* bytes, size_t j) {
  float value;
  std::memcpy(&value, bytes + j * sizeof(float), sizeof(float));
  return value;
}

BAGUA_INLINE bool is_marked(const uint8_t* bytes) { return magnitude_of(load_value(bytes, 0)) >= kF32Inf; }

// Calls body(rank among those that travel, index in the block).
template <typename Body>
BAGUA_INLINE void for_each_index(const uint8_t* bytes, size_t k, size_t count, Body body) {
  for (size_t j = 0; j < k; ++j) {
    uint16_t index;
    std::memcpy(&index, bytes + k * sizeof(float) + j * sizeof(uint16_t), sizeof(uint16_t));
    if (index < count) body(j, index);
  }
}

void decode_f32(const uint8_t* bytes, size_t k, size_t count, float* destination) {
  if (is_marked(bytes)) {
    std::fill_n(destination, count, kNan);
    return;
  }
  std::memset(destination, 0, count * sizeof(float));
  for_each_index(bytes, k, count, [&](size_t j, size_t index) { destination[index] = load_value(bytes, j); });
}

void decode_half(DType dtype, const uint8_t* bytes, size_t k, size_t count, unaligned_u16* destination) {
  const bool is_nan = is_marked(bytes);
  float values[kTopkMaxK];
  uint16_t halves[kTopkMaxK];
  std::memcpy(values, bytes, k * sizeof(float));
  if (is_nan) values[0] = kNan;
  dtype == DType::kF16 ? narrow_f16(values, halves, k) : narrow_bf16(values, halves, k);
  const uint16_t other = is_nan ? halves[0] : uint16_t{0};
  for (size_t i = 0; i < count; ++i) destination[i] = other;  // no std::fill, which forgets that it is unaligned
  if (is_nan) return;
  for_each_index(bytes, k, count, [&](size_t j, size_t index) { destination[index] = halves[j]; });
}

// Decodes from what travels straight to what it is stored as, without an f32 block between.
struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  static constexpr float kPadding = 0.0f;
  const size_t k;
  Blocks(int option, CounterRng) : k(static_cast<size_t>(option)) {}

  size_t num_kept(size_t numel) const { return std::min(k, numel); }
  size_t wire_bytes() const { return k * kTopkElementBytes; }
  size_t encoded_numel(size_t) const { return kBlockNumel; }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !encode_block(source, num_kept(numel), bytes);
  }
  size_t decoded_numel(size_t numel) const { return numel; }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    decode_f32(bytes, num_kept(numel), numel, destination);
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    if (is_marked(bytes)) return store_all<Store::kAdd>(kNan, numel, destination);
    for_each_index(bytes, num_kept(numel), numel, [&](size_t j, size_t i) { destination[i] += load_value(bytes, j); });
  }
};

void decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream) {
  const Blocks blocks(k, {});
  for_each_block(blocks, numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    if (dtype == DType::kF32) {
      blocks.decode(bytes + offset_bytes, count, static_cast<float*>(destination) + begin);
    } else {
      auto* halves = static_cast<unaligned_u16*>(destination) + begin;
      decode_half(dtype, bytes + offset_bytes, blocks.num_kept(count), count, halves);
    }
  });
}

}  // namespace
}  // namespace topk

const BlockKernels kTopk = [] {
  BlockKernels kernels = kBlockKernels<topk::Blocks>;
  kernels.decode = topk::decode;
  return kernels;
}();

}  // namespace bagua::kernels::cpu

// CPU form of the sign quantiser (contract and formula: onebit.h). f16, bf16 and short blocks go through an f32 block
// on the stack; a block's eight parts are packed side by side, so that all strides are one.
#include "csrc/kernels/onebit.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace onebit {  // a name, because the tests compile the kernels of several files into one
namespace {

constexpr size_t kBlockNumel = kOnebitBlockNumel;
constexpr size_t kHeaderBytes = kOnebitHeaderBytes;
constexpr size_t kLanes = 64;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr size_t padded_numel(size_t numel) { return (numel + 7) / 8 * 8; }

// `source` has kBlockNumel elements, of which the first `numel` count and the others are +0.
BAGUA_MULTIVERSION bool encode_block(const float* __restrict source, size_t numel, uint8_t* __restrict bytes) {
  double lanes[kLanes] = {};
  uint32_t largest = 0;
  for (size_t i = 0; i < kBlockNumel; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(source[i + lane]) & kF32Abs;
      largest = magnitude > largest ? magnitude : largest;
      lanes[lane] += static_cast<double>(std::bit_cast<float>(magnitude));
    }
  }
  const size_t part = padded_numel(numel) / 8;
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  const bool finite = largest < kF32Inf;
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  const float scale = finite ? static_cast<float>(lanes[0] / static_cast<double>(numel)) : kNan;
  std::memcpy(bytes, &scale, kHeaderBytes);
  for (size_t j = 0; j < part; ++j) {
    uint32_t code = 0;
    for (size_t k = 0; k < 8; ++k) code |= std::bit_cast<uint32_t>(source[j + k * part]) >> 31 << k;
    codes[j] = static_cast<uint8_t>(code);
  }
  return finite;
}

enum class Store { kAssign, kAdd };

template <Store kStore>
BAGUA_INLINE void decode_part(const uint8_t* __restrict codes, size_t part, int bit, uint32_t scale,
                              float* __restrict destination) {
  for (size_t j = 0; j < part; ++j) {
    const uint32_t sign = static_cast<uint32_t>(codes[j]) >> bit << 31;
    const float value = std::bit_cast<float>(scale | sign);
    if constexpr (kStore == Store::kAssign) destination[j] = value;
    if constexpr (kStore == Store::kAdd) destination[j] += value;
  }
}

// `destination` has padded_numel(numel) elements.
template <Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* bytes, size_t numel, float* destination) {
  uint32_t scale;
  std::memcpy(&scale, bytes, kHeaderBytes);
  const size_t part = padded_numel(numel) / 8;
  scale = (scale & kF32Abs) >= kF32Inf ? std::bit_cast<uint32_t>(kNan) : scale & kF32Abs;
  for (int bit = 0; bit < 8; ++bit) {
    decode_part<kStore>(bytes + kHeaderBytes, part, bit, scale, destination + static_cast<size_t>(bit) * part);
  }
}

BAGUA_MULTIVERSION void assign(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Store::kAssign>(bytes, numel, destination);
}
BAGUA_MULTIVERSION void add(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Store::kAdd>(bytes, numel, destination);
}

// Calls body(first element, elements, the block's bytes) for every block.
template <typename Body>
void for_each_block(size_t numel, Body body) {
  for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
    body(begin, std::min(kBlockNumel, numel - begin), begin / kBlockNumel * (kHeaderBytes + kBlockNumel / 8));
  }
}

}  // namespace
}  // namespace onebit

void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  uint64_t num_nonfinite = 0;
  alignas(64) float block[kOnebitBlockNumel];
  onebit::for_each_block(numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    const float* values = static_cast<const float*>(source) + begin;
    const bool is_direct = dtype == DType::kF32 && count == kOnebitBlockNumel;
    if (dtype != DType::kF32) {
      const auto* halves = static_cast<const unaligned_u16*>(source) + begin;
      dtype == DType::kF16 ? widen_f16(halves, block, count) : widen_bf16(halves, block, count);
    } else if (!is_direct) {
      std::memcpy(block, values, count * sizeof(float));
    }
    std::fill(block + count, block + kOnebitBlockNumel, 0.0f);
    num_nonfinite += !onebit::encode_block(is_direct ? values : block, count, bytes + offset_bytes);
  });
  if (num_nonfinite_blocks != nullptr) *num_nonfinite_blocks += num_nonfinite;
}

void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination) {
  alignas(64) float block[kOnebitBlockNumel];
  onebit::for_each_block(numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    if (dtype == DType::kF32 && count % 8 == 0) {
      return onebit::assign(bytes + offset_bytes, count, static_cast<float*>(destination) + begin);
    }
    onebit::assign(bytes + offset_bytes, count, block);
    if (dtype == DType::kF32) {
      std::memcpy(static_cast<float*>(destination) + begin, block, count * sizeof(float));
    } else {
      auto* halves = static_cast<unaligned_u16*>(destination) + begin;
      dtype == DType::kF16 ? narrow_f16(block, halves, count) : narrow_bf16(block, halves, count);
    }
  });
}

void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator) {
  alignas(64) float block[kOnebitBlockNumel];
  onebit::for_each_block(numel, [&](size_t begin, size_t count, size_t offset_bytes) {
    if (count % 8 == 0) return onebit::add(bytes + offset_bytes, count, accumulator + begin);
    onebit::assign(bytes + offset_bytes, count, block);
    for (size_t i = 0; i < count; ++i) accumulator[begin + i] += block[i];
  });
}

}  // namespace bagua::kernels::cpu

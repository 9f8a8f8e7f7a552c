// CPU form of the sign quantiser (contract and formula: onebit.h). A block's eight parts are packed side by side, so
// that all strides are one.
#include "csrc/kernels/onebit.h"

#include <bit>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"

namespace bagua::kernels::cpu {
namespace onebit {  // a name, because the tests compile the kernels of several files into one
namespace {

constexpr size_t kHeaderBytes = kOnebitHeaderBytes;
constexpr size_t kLanes = 64;

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
  const uint32_t kept = finite ? 0xffu : 0u;
  for (size_t j = 0; j < part; ++j) {
    uint32_t code = 0;
    for (size_t k = 0; k < 8; ++k) code |= std::bit_cast<uint32_t>(source[j + k * part]) >> 31 << k;
    codes[j] = static_cast<uint8_t>(code & kept);
  }
  return finite;
}

template <Store kStore>
BAGUA_INLINE void decode_part(const uint8_t* __restrict codes, size_t part, int bit, uint32_t scale,
                              float* __restrict destination) {
  for (size_t j = 0; j < part; ++j) {
    const uint32_t sign = static_cast<uint32_t>(codes[j]) >> bit << 31;
    store<kStore>(std::bit_cast<float>(scale | sign), destination[j]);
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

struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  static constexpr float kPadding = 0.0f;
  Blocks(int, CounterRng) {}
  size_t wire_bytes() const { return kHeaderBytes + kBlockNumel / 8; }
  size_t encoded_numel(size_t) const { return kBlockNumel; }
  size_t decoded_numel(size_t numel) const { return padded_numel(numel); }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !encode_block(source, numel, bytes);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const { assign(bytes, numel, destination); }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const { add(bytes, numel, destination); }
};

}  // namespace
}  // namespace onebit

const BlockKernels kOnebit = kBlockKernels<onebit::Blocks>;

}  // namespace bagua::kernels::cpu

// CPU form of the quantiser to four centroids (contract and formula: centroid.h). A block's four parts are packed side
// by side, so that all strides are one.
#include "csrc/kernels/centroid.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "csrc/kernels/arithmetic/centroid.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"

namespace bagua::kernels::cpu {
namespace centroid {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::centroid;

namespace {

static_assert(std::endian::native == std::endian::little, "the header is stored as it lies in memory");

constexpr size_t kHeaderBytes = kCentroidHeaderBytes;
constexpr size_t kLanes = 64;
constexpr size_t kNumParts = 4;

constexpr size_t padded_numel(size_t numel) { return (numel + kNumParts - 1) / kNumParts * kNumParts; }

// The mean of term(x).
template <typename Term>
BAGUA_INLINE double mean_of(const float* __restrict source, size_t numel, Term term) {
  double lanes[kLanes];
  for (double& lane : lanes) lane = -0.0;
  const size_t whole = numel / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(static_cast<double>(source[i + lane]));
  }
  for (size_t i = whole; i < numel; ++i) lanes[i - whole] += term(static_cast<double>(source[i]));
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0] / static_cast<double>(numel);
}

// `source` has padded_numel(numel) elements, of which the first `numel` count and the others are -Inf, so that their
// code is 0. Returns whether the block is finite.
BAGUA_MULTIVERSION bool encode_block(const float* __restrict source, size_t numel, uint8_t* __restrict bytes) {
  uint32_t largest = 0;
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(source[i]) & kF32Abs;
    largest = magnitude > largest ? magnitude : largest;
  }
  const size_t part = padded_numel(numel) / kNumParts;
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  if (largest >= kF32Inf) {
    const Header header{kNan, kNan};
    std::memcpy(bytes, &header, kHeaderBytes);
    std::memset(codes, 0, part);
    return false;
  }
  Header header;
  header.mean = static_cast<float>(mean_of(source, numel, [](double x) { return x; }));
  const double mean = static_cast<double>(header.mean);
  header.sigma =
      static_cast<float>(std::sqrt(mean_of(source, numel, [=](double x) { return (x - mean) * (x - mean); })));
  std::memcpy(bytes, &header, kHeaderBytes);
  const Thresholds thresholds = thresholds_of(header);
  for (size_t j = 0; j < part; ++j) {
    uint32_t code = 0;
    for (size_t p = 0; p < kNumParts; ++p) code |= code_of(source[j + p * part], thresholds) << (2 * p);
    codes[j] = static_cast<uint8_t>(code);
  }
  return true;
}

// `destination` has padded_numel(numel) elements.
template <Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* __restrict bytes, size_t numel, float* __restrict destination) {
  Header header;
  std::memcpy(&header, bytes, kHeaderBytes);
  const Levels levels = levels_of(header);
  const size_t part = padded_numel(numel) / kNumParts;
  const uint8_t* __restrict codes = bytes + kHeaderBytes;
  for (size_t p = 0; p < kNumParts; ++p) {
    float* __restrict values = destination + p * part;
    for (size_t j = 0; j < part; ++j) {
      store<kStore>(value_of(static_cast<uint32_t>(codes[j]) >> (2 * p), levels), values[j]);
    }
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
  static constexpr float kPadding = -std::numeric_limits<float>::infinity();
  static constexpr bool kSaturates = true;
  Blocks(int, CounterRng) {}
  size_t wire_bytes() const { return kHeaderBytes + kBlockNumel / kNumParts; }
  size_t encoded_numel(size_t numel) const { return padded_numel(numel); }
  size_t decoded_numel(size_t numel) const { return padded_numel(numel); }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !encode_block(source, numel, bytes);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const { assign(bytes, numel, destination); }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const { add(bytes, numel, destination); }
};

}  // namespace
}  // namespace centroid

const BlockKernels kCentroid = kBlockKernels<centroid::Blocks>;

}  // namespace bagua::kernels::cpu

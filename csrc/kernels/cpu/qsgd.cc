// CPU form of the stochastic quantiser (contract and formula: qsgd.h). One block is 8 KB of f32 and stays in L1 between
// the pass that finds the norm and the pass that writes codes. The loops run over the counters, so that one hash serves
// two elements and all strides are one.
#include "csrc/kernels/qsgd.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/kernels/arithmetic/qsgd.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/prefetch.h"

namespace bagua::kernels::cpu {
namespace qsgd {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::qsgd;

namespace {

static_assert(std::endian::native == std::endian::little, "the header is stored as it lies in memory");

constexpr size_t kHeaderBytes = kQsgdHeaderBytes;

// The codes of the `padded` elements x * s, of which `count` counters from `first` on say which.
template <int kBits>
BAGUA_INLINE void encode_codes(const float* __restrict source, size_t padded, size_t first, size_t count,
                               const Steps& steps, uint8_t* __restrict codes, BlockRng rng) {
  const size_t half = padded / 2;
  source += first;
  codes += first;
  const float* __restrict upper = source + half;
  uint32_t counter = rng.counter(static_cast<uint32_t>(first));
  if constexpr (kBits == 8) {
    uint8_t* __restrict upper_codes = codes + half;
    for (size_t j = 0; j < count; ++j, counter += BlockRng::kStride) {
      const uint32_t hash = rng.hash(counter);
      codes[j] = static_cast<uint8_t>(code_of<kBits>(source[j], BlockRng::first_of(hash), steps));
      upper_codes[j] = static_cast<uint8_t>(code_of<kBits>(upper[j], BlockRng::second_of(hash), steps));
    }
  } else if constexpr (kBits == 4) {
    for (size_t j = 0; j < count; ++j, counter += BlockRng::kStride) {
      const uint32_t hash = rng.hash(counter);
      const uint32_t low = code_of<kBits>(source[j], BlockRng::first_of(hash), steps);
      const uint32_t high = code_of<kBits>(upper[j], BlockRng::second_of(hash), steps);
      codes[j] = static_cast<uint8_t>(low | high << 4);
    }
  } else {
    const size_t quarter = half / 2;
    const float* __restrict second = source + quarter;
    const float* __restrict fourth = upper + quarter;
    for (size_t j = 0; j < count; ++j, counter += BlockRng::kStride) {
      const uint32_t hash = rng.hash(counter);
      const uint32_t other = rng.hash(counter + static_cast<uint32_t>(quarter) * BlockRng::kStride);
      const uint32_t code = code_of<kBits>(source[j], BlockRng::first_of(hash), steps) |
                            code_of<kBits>(second[j], BlockRng::first_of(other), steps) << 2 |
                            code_of<kBits>(upper[j], BlockRng::second_of(hash), steps) << 4 |
                            code_of<kBits>(fourth[j], BlockRng::second_of(other), steps) << 6;
      codes[j] = static_cast<uint8_t>(code);
    }
  }
}

// `source` has qsgd_padded_numel elements. Returns whether the block is finite.
template <int kBits>
BAGUA_INLINE bool encode_block(const float* __restrict source, size_t padded, uint8_t* __restrict bytes, BlockRng rng) {
  const float* const next = source + kBlockNumel;
  uint32_t largest = 0;
  for (size_t i = 0; i < padded; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(source[i]) & kF32Abs;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  if (largest >= kF32Inf || largest == 0) {
    uint32_t signs = ~0u;
    for (size_t i = 0; i < padded; ++i) signs &= std::bit_cast<uint32_t>(source[i]);
    const float header = largest == 0 ? std::bit_cast<float>(signs) : kNan;
    std::memcpy(bytes, &header, kHeaderBytes);
    std::memset(codes, 0, padded * kBits / 8);
    return largest == 0;
  }
  std::memcpy(bytes, &largest, kHeaderBytes);
  float norm = std::bit_cast<float>(largest);
  alignas(64) float scaled[kBlockNumel];
  if (largest < kUnscaledNorm) {
    for (size_t i = 0; i < padded; ++i) scaled[i] = scale_up(source[i]);
    norm = scale_up(norm);
    source = scaled;
  }
  const Steps steps = steps_of(norm, levels(kBits));
  constexpr size_t kCounterNumel = kBits == 2 ? 4 : 2;  // elements that a counter stands for
  constexpr size_t kPart = kPrefetchNumel / kCounterNumel;
  const size_t num_counters = padded / kCounterNumel;
  for (size_t first = 0; first < num_counters; first += kPart) {
    prefetch(next + first * kCounterNumel);
    encode_codes<kBits>(source, padded, first, std::min(kPart, num_counters - first), steps, codes, rng);
  }
  return true;
}

// The elements whose codes stand kShift bits up in their bytes.
template <int kBits, bool kIsApart, int kShift, Store kStore>
BAGUA_INLINE void decode_part(const uint8_t* __restrict codes, size_t numel, const Steps& steps,
                              float* __restrict destination) {
  constexpr int32_t kMask = (1 << kBits) - 1;
  for (size_t j = 0; j < numel; ++j) {
    const int32_t code = static_cast<int32_t>(codes[j]) >> kShift & kMask;
    store<kStore>(value_of<kBits, kIsApart>(code - levels(kBits), steps), destination[j]);
  }
}

template <int kBits, bool kIsApart, Store kStore>
BAGUA_INLINE void decode_parts(const uint8_t* __restrict codes, size_t padded, const Steps& steps,
                               float* __restrict destination) {
  const size_t part = padded * kBits / 8;
  decode_part<kBits, kIsApart, 0, kStore>(codes, part, steps, destination);
  if constexpr (kBits <= 4) decode_part<kBits, kIsApart, kBits, kStore>(codes, part, steps, destination + part);
  if constexpr (kBits == 2) {
    decode_part<kBits, kIsApart, 4, kStore>(codes, part, steps, destination + 2 * part);
    decode_part<kBits, kIsApart, 6, kStore>(codes, part, steps, destination + 3 * part);
  }
}

// L * step is, for most norms, the norm, and then no element has to be looked at for it.
template <int kBits, Store kStore>
BAGUA_INLINE void decode_codes(const uint8_t* __restrict codes, size_t padded, float norm,
                               float* __restrict destination) {
  constexpr int32_t kLevels = levels(kBits);
  const Steps steps = steps_of(norm, kLevels);
  if (static_cast<float>(kLevels) * steps.step == norm) {
    decode_parts<kBits, false, kStore>(codes, padded, steps, destination);
  } else {
    decode_parts<kBits, true, kStore>(codes, padded, steps, destination);
  }
}

// `destination` has qsgd_padded_numel elements.
template <int kBits, Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* __restrict bytes, size_t padded, float* __restrict destination) {
  float norm;
  std::memcpy(&norm, bytes, kHeaderBytes);
  const uint32_t norm_bits = std::bit_cast<uint32_t>(norm), magnitude = norm_bits & kF32Abs;
  if (magnitude >= kF32Inf || magnitude == 0) {
    return store_all<kStore>(magnitude == 0 ? norm : kNan, padded, destination);
  }
  norm = std::bit_cast<float>(magnitude);
  if (magnitude >= kUnscaledNorm) return decode_codes<kBits, kStore>(bytes + kHeaderBytes, padded, norm, destination);
  alignas(64) float scaled[kBlockNumel];
  decode_codes<kBits, Store::kAssign>(bytes + kHeaderBytes, padded, scale_up(norm), scaled);
  for (size_t i = 0; i < padded; ++i) store<kStore>(scale_down(scaled[i]), destination[i]);
}

BAGUA_MULTIVERSION bool encode_8(const float* source, size_t padded, uint8_t* bytes, BlockRng rng) {
  return encode_block<8>(source, padded, bytes, rng);
}
BAGUA_MULTIVERSION bool encode_4(const float* source, size_t padded, uint8_t* bytes, BlockRng rng) {
  return encode_block<4>(source, padded, bytes, rng);
}
BAGUA_MULTIVERSION bool encode_2(const float* source, size_t padded, uint8_t* bytes, BlockRng rng) {
  return encode_block<2>(source, padded, bytes, rng);
}
BAGUA_MULTIVERSION void assign_8(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<8, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void assign_4(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<4, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void assign_2(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<2, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_8(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<8, Store::kAdd>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_4(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<4, Store::kAdd>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_2(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<2, Store::kAdd>(bytes, padded, destination);
}

struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  // Not a zero with a sign of its own where all others are -0.0.
  static constexpr float kPadding = -0.0f;
  const int bits;
  const CounterRng rng;

  size_t wire_bytes() const { return qsgd_block_bytes(kBlockNumel, bits); }
  size_t encoded_numel(size_t numel) const { return qsgd_padded_numel(numel, bits); }
  size_t decoded_numel(size_t numel) const { return qsgd_padded_numel(numel, bits); }
  size_t encode(const float* source, size_t begin, size_t numel, uint8_t* bytes) const {
    const BlockRng block_rng(derive_key(rng.key, (rng.first + begin) / kBlockNumel));
    return !(bits == 8 ? encode_8 : bits == 4 ? encode_4 : encode_2)(source, encoded_numel(numel), bytes, block_rng);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    (bits == 8 ? assign_8 : bits == 4 ? assign_4 : assign_2)(bytes, decoded_numel(numel), destination);
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    (bits == 8 ? add_8 : bits == 4 ? add_4 : add_2)(bytes, decoded_numel(numel), destination);
  }
};

}  // namespace
}  // namespace qsgd

const BlockKernels kQsgd = kBlockKernels<qsgd::Blocks>;

}  // namespace bagua::kernels::cpu

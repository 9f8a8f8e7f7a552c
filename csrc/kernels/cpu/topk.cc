// CPU form of the sparsifier (contract and selection: topk.h). No sort: the upper 15 bits of the magnitudes are 4 KB of
// int16, in which a search for the threshold counts, a vectorised pass over the keys per limit, until a limit has
// exactly k elements at or above it. Only where the elements around the threshold agree in those bits, a second search
// decides by the lower 16. f16, bf16 and short blocks go through an f32 block on the stack.
#include "csrc/kernels/topk.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"

namespace bagua::kernels::cpu {
namespace topk {  // a name, because the tests compile the kernels of several files into one
namespace {

static_assert(std::endian::native == std::endian::little, "values and indices are stored as they lie in memory");

constexpr int kLowBits = 16;
constexpr int kSmallestKey = -(1 << 15);
constexpr int kHalfAnOctave = 64;     // in upper keys
constexpr int kWholeRange = 1 << 17;  // a stride that no range of keys has room for

BAGUA_INLINE uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & kF32Abs; }

struct alignas(64) Keys {
  int16_t of[kBlockNumel];

  // `limit` fits in a key, which the vectoriser has to see, and so does a count. clang, which derives that the narrow
  // limit is `limit`, would widen the keys, so the value is hidden from it.
  BAGUA_INLINE int num_at_least(int limit) const {
    auto narrow_limit = static_cast<int16_t>(limit);
    asm("" : "+r"(narrow_limit));
    int16_t count = 0;
    for (size_t i = 0; i < kBlockNumel; ++i) count = static_cast<int16_t>(count + (of[i] >= narrow_limit));
    return count;
  }
};

struct Limit {
  int key;
  bool is_exact;     // as many keys as wanted reach it; else more, and fewer reach the next
  size_t num_above;  // unless exact: keys that exceed it
};

// `low` is reached by more than `wanted` keys, `high` by none. Asks first at `stride` below `high`, which doubles.
BAGUA_INLINE Limit find_limit(const Keys& keys, int wanted, int low, int high, int stride) {
  int num_high = 0;
  while (high - low > 1) {
    const bool has_stride = stride < high - low;
    const int probe = has_stride ? high - stride : low + (high - low) / 2;
    const int count = keys.num_at_least(probe);
    if (count == wanted) return {probe, true, 0};
    if (count > wanted) {
      low = probe;
      stride = kWholeRange;
    } else {
      high = probe;
      num_high = count;
      if (has_stride) stride *= 2;
    }
  }
  return {low, false, static_cast<size_t>(num_high)};
}

// The elements that travel: every magnitude above `magnitude`, and the first `num_ties` that are equal to it.
struct Selection {
  uint32_t magnitude;
  size_t num_ties;
};

// The upper 15 bits of a magnitude are not negative, so their order is that of signed numbers too. Returns the largest
// magnitude.
BAGUA_INLINE uint32_t take_upper_keys(const float* __restrict source, Keys& keys) {
  int32_t most = 0;
  for (size_t i = 0; i < kBlockNumel; ++i) {
    const auto magnitude = static_cast<int32_t>(magnitude_of(source[i]));
    keys.of[i] = static_cast<int16_t>(magnitude >> kLowBits);
    most = magnitude > most ? magnitude : most;
  }
  return static_cast<uint32_t>(most);
}

// The lower 16 bits of the magnitudes whose upper ones are `upper`, less 2^15; of the others the smallest key.
BAGUA_INLINE void take_lower_keys(const float* __restrict source, uint32_t upper, Keys& keys) {
  for (size_t i = 0; i < kBlockNumel; ++i) {
    const uint32_t magnitude = magnitude_of(source[i]);
    const uint32_t lower = select(magnitude >> kLowBits == upper, magnitude & 0xffffu, 0);
    keys.of[i] = static_cast<int16_t>(static_cast<int32_t>(lower) + kSmallestKey);
  }
}

BAGUA_INLINE Selection select_largest(const float* __restrict source, size_t k, uint32_t largest, Keys& keys) {
  // Half an octave below the largest first, because the k largest seldom span many powers of two.
  const Limit upper =
      find_limit(keys, static_cast<int>(k), 0, static_cast<int>(largest >> kLowBits) + 1, kHalfAnOctave);
  const uint32_t upper_bits = static_cast<uint32_t>(upper.key) << kLowBits;
  if (upper.is_exact) return {upper_bits - 1, 0};
  const size_t wanted = k - upper.num_above;
  take_lower_keys(source, static_cast<uint32_t>(upper.key), keys);
  const Limit lower = find_limit(keys, static_cast<int>(wanted), kSmallestKey, -kSmallestKey, kWholeRange);
  const uint32_t magnitude = upper_bits + static_cast<uint32_t>(lower.key - kSmallestKey);
  if (lower.is_exact) return {magnitude - 1, 0};
  return {magnitude, wanted - lower.num_above};
}

// 64 flags of 0 or 1 as the bits of a word.
BAGUA_INLINE uint64_t pack_flags(const uint8_t* flags) {
  uint64_t word = 0;
  for (size_t byte = 0; byte < 8; ++byte) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * byte, 8);
    word |= eight * 0x0102040810204080u >> 56 << (8 * byte);  // the product has flag i at bit 56 + i
  }
  return word;
}

// The indices of what travels, in ascending order.
BAGUA_INLINE void list_selected(const float* __restrict source, Selection selection, uint16_t* __restrict indices) {
  alignas(64) uint8_t above[kBlockNumel], equal[kBlockNumel];
  for (size_t i = 0; i < kBlockNumel; ++i) above[i] = magnitude_of(source[i]) > selection.magnitude;
  size_t num_ties = selection.num_ties;
  if (num_ties > 0) {
    for (size_t i = 0; i < kBlockNumel; ++i) equal[i] = magnitude_of(source[i]) == selection.magnitude;
  }
  for (size_t begin = 0; begin < kBlockNumel; begin += 64) {
    uint64_t chosen = pack_flags(above + begin);
    if (num_ties > 0) {
      for (uint64_t ties = pack_flags(equal + begin); ties != 0 && num_ties > 0; --num_ties) {
        chosen |= ties & (~ties + 1);
        ties &= ties - 1;
      }
    }
    for (; chosen != 0; chosen &= chosen - 1) {
      *indices++ = static_cast<uint16_t>(begin + static_cast<size_t>(std::countr_zero(chosen)));
    }
  }
}

// `source` has kBlockNumel elements, of which `k` or more are the block's and those behind them +0, which no other
// element is smaller than. Returns whether the block is finite.
BAGUA_MULTIVERSION bool encode_block(const float* __restrict source, size_t k, uint8_t* __restrict bytes) {
  Keys keys;
  uint16_t indices[kTopkMaxK];
  float values[kTopkMaxK];
  const uint32_t largest = take_upper_keys(source, keys);
  const bool finite = largest < kF32Inf;
  if (finite) {
    list_selected(source, select_largest(source, k, largest, keys), indices);
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

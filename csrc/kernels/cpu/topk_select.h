// The selection of the k largest magnitudes of a block, for the CPU forms of the sparsifiers (topk.h, topk_chunk.h). No
// sort: the upper 15 bits of the magnitudes are int16, in which a search for the threshold counts, a vectorised pass
// over the keys per limit, until a limit has exactly k elements at or above it. Only where the elements around the
// threshold agree in those bits, a second search decides by the lower 16.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu::topk {

static_assert(std::endian::native == std::endian::little, "values and indices are stored as they lie in memory");

inline constexpr int kLowBits = 16;
inline constexpr int kSmallestKey = -(1 << 15);
inline constexpr int kHalfAnOctave = 64;     // in upper keys
inline constexpr int kWholeRange = 1 << 17;  // a stride that no range of keys has room for

BAGUA_INLINE uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & kF32Abs; }

template <size_t kNumel>
struct alignas(64) Keys {
  int16_t of[kNumel];

  // `limit` fits in a key, which the vectoriser has to see, and so does a count. clang, which derives that the narrow
  // limit is `limit`, would widen the keys, so the value is hidden from it.
  BAGUA_INLINE int num_at_least(int limit) const {
    auto narrow_limit = static_cast<int16_t>(limit);
    asm("" : "+r"(narrow_limit));
    int16_t count = 0;
    for (size_t i = 0; i < kNumel; ++i) count = static_cast<int16_t>(count + (of[i] >= narrow_limit));
    return count;
  }
};

struct Limit {
  int key;
  bool is_exact;     // as many keys as wanted reach it; else more, and fewer reach the next
  size_t num_above;  // unless exact: keys that exceed it
};

// `low` is reached by more than `wanted` keys, `high` by none. Asks first at `stride` below `high`, which doubles.
template <size_t kNumel>
BAGUA_INLINE Limit find_limit(const Keys<kNumel>& keys, int wanted, int low, int high, int stride) {
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
template <size_t kNumel>
BAGUA_INLINE uint32_t take_upper_keys(const float* __restrict source, Keys<kNumel>& keys) {
  int32_t most = 0;
  for (size_t i = 0; i < kNumel; ++i) {
    const auto magnitude = static_cast<int32_t>(magnitude_of(source[i]));
    keys.of[i] = static_cast<int16_t>(magnitude >> kLowBits);
    most = magnitude > most ? magnitude : most;
  }
  return static_cast<uint32_t>(most);
}

// The lower 16 bits of the magnitudes whose upper ones are `upper`, less 2^15; of the others the smallest key.
template <size_t kNumel>
BAGUA_INLINE void take_lower_keys(const float* __restrict source, uint32_t upper, Keys<kNumel>& keys) {
  for (size_t i = 0; i < kNumel; ++i) {
    const uint32_t magnitude = magnitude_of(source[i]);
    const uint32_t lower = select(magnitude >> kLowBits == upper, magnitude & 0xffffu, 0);
    keys.of[i] = static_cast<int16_t>(static_cast<int32_t>(lower) + kSmallestKey);
  }
}

template <size_t kNumel>
BAGUA_INLINE Selection select_largest(const float* __restrict source, size_t k, uint32_t largest, Keys<kNumel>& keys) {
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
template <size_t kNumel>
BAGUA_INLINE void list_selected(const float* __restrict source, Selection selection, uint16_t* __restrict indices) {
  alignas(64) uint8_t above[kNumel], equal[kNumel];
  for (size_t i = 0; i < kNumel; ++i) above[i] = magnitude_of(source[i]) > selection.magnitude;
  size_t num_ties = selection.num_ties;
  if (num_ties > 0) {
    for (size_t i = 0; i < kNumel; ++i) equal[i] = magnitude_of(source[i]) == selection.magnitude;
  }
  for (size_t begin = 0; begin < kNumel; begin += 64) {
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

}  // namespace bagua::kernels::cpu::topk

// CounterRng: where the numbers of stochastic rounding come from. A counter-based generator: what element i draws is a
// function of the key and of i alone, so it does not depend on threads, on chunking or on the device, and a replay
// with the same key draws the same. Nothing is stored.
//
// Per block of elements a 64-bit key, from splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014); per counter in the block a 32-bit hash, two rounds of multiply and shift with the constants of
// "lowbias32" (Wellons, "Prospecting for hash functions", 2018), of which two elements take 15 bits each.
#pragma once

#include <cstdint>

#include "csrc/kernels/multiversion.h"

namespace bagua {

// The numbers of a message whose first element is element `first`, a multiple of the codec's block, of what the key
// stands for.
struct CounterRng {
  uint64_t key = 0;
  uint64_t first = 0;
};

// A bijection that leaves no pattern.
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A key that depends on both, and not on which of several callers made it.
constexpr uint64_t derive_key(uint64_t key, uint64_t index) {
  return mix_bits(mix_bits(key) + 0x9e3779b97f4a7c15u * (index + 1));
}

namespace kernels {

inline constexpr int kRandomBits = 15;

struct BlockRng {
  uint32_t low, high;

  explicit constexpr BlockRng(uint64_t block_key)
      : low(static_cast<uint32_t>(block_key)), high(static_cast<uint32_t>(block_key >> 32)) {}

  // Counter `index` of the block; from one to the next it is kStride.
  static constexpr uint32_t kStride = 0x9e3779b1u;
  BAGUA_INLINE uint32_t counter(uint32_t index) const { return index * kStride + low; }

  BAGUA_INLINE uint32_t hash(uint32_t counter) const {
    uint32_t x = (counter ^ (counter >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15) ^ high) * 0x846ca68bu;
    return x ^ (x >> 16);
  }
  // Two draws of kRandomBits bits from one hash.
  static BAGUA_INLINE uint32_t first_of(uint32_t hash) { return hash & 0x7fffu; }
  static BAGUA_INLINE uint32_t second_of(uint32_t hash) { return hash >> 17; }
};

}  // namespace kernels
}  // namespace bagua

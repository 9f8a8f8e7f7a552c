// The keys of the digest, its mixing of 64 bits, and the term of a block, for both backends. Integers only, so the CPU
// and a GPU give the same bits.
#pragma once

#include <cstdint>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

// The finalizer of MurmurHash3 for 32 bits, of a word's place in its block.
constexpr BAGUA_INLINE uint32_t digest_key(uint32_t word) {
  uint32_t key = word + 0x9e3779b9u;
  key = (key ^ key >> 16) * 0x85ebca6bu;
  key = (key ^ key >> 13) * 0xc2b2ae35u;
  return key ^ key >> 16;
}

// A bijection: the finalizer of SplitMix64.
constexpr BAGUA_INLINE uint64_t digest_mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

// The term of block number `block`, from its sums of products and of words (digest.h).
constexpr BAGUA_INLINE uint64_t digest_of_block(uint64_t block, uint64_t products, uint32_t words) {
  return digest_mix(digest_mix(products + (block + 1) * 0x9e3779b97f4a7c15u) + words);
}

// The term of the size, by which zeros at the end count.
constexpr BAGUA_INLINE uint64_t digest_of_size(uint64_t num_bytes) {
  return digest_mix(num_bytes ^ 0xd1b54a32d192ed03u);
}

}  // namespace bagua::kernels

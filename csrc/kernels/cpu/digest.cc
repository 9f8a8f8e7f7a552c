// CPU form of the digest; contract: digest.h. One pass over the memory, in blocks whose sums stay in registers.
#include "csrc/kernels/digest.h"

#include <array>
#include <cstring>

#include "csrc/kernels/arithmetic/digest.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {
namespace {

constexpr size_t kHalfNumWords = kDigestBlockBytes / sizeof(uint32_t) / 2;
// A word of any memory, at any alignment.
typedef uint32_t Word __attribute__((may_alias, aligned(1)));

struct Keys {
  constexpr Keys() {
    for (uint32_t i = 0; i < kHalfNumWords; ++i) {
      low[i] = digest_key(i);
      high[i] = digest_key(i + static_cast<uint32_t>(kHalfNumWords));
    }
  }
  alignas(64) uint32_t low[kHalfNumWords] = {};
  alignas(64) uint32_t high[kHalfNumWords] = {};
};
constexpr Keys kKeys;

BAGUA_MULTIVERSION uint64_t digest_blocks(const uint8_t* data, size_t first_block, size_t num_blocks) {
  uint64_t total = 0;
  for (size_t block = 0; block < num_blocks; ++block) {
    const auto* low = reinterpret_cast<const Word*>(data + block * kDigestBlockBytes);
    const Word* high = low + kHalfNumWords;
    uint64_t products = 0;
    uint32_t words = 0;
    for (size_t i = 0; i < kHalfNumWords; ++i) {
      products += uint64_t{low[i] ^ kKeys.low[i]} * (high[i] ^ kKeys.high[i]);
      words += low[i] + high[i];
    }
    total += digest_of_block(first_block + block, products, words);
  }
  return total;
}

}  // namespace

uint64_t digest(const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t num_whole = num_bytes / kDigestBlockBytes, rest = num_bytes % kDigestBlockBytes;
  uint64_t total = digest_of_size(num_bytes) + digest_blocks(bytes, 0, num_whole);
  if (rest > 0) {
    std::array<uint8_t, kDigestBlockBytes> last{};
    std::memcpy(last.data(), bytes + num_whole * kDigestBlockBytes, rest);
    total += digest_blocks(last.data(), num_whole, 1);
  }
  return total;
}

}  // namespace bagua::kernels::cpu

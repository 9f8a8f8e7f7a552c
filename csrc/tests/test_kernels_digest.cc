// The digest against a loop over bytes written from its contract: sizes x misalignment x contents; each flipped bit,
// each exchange of elements or blocks and each zero at the end changes it; many pieces in one call.
#include "csrc/kernels/digest.h"

#include <algorithm>
#include <set>

#include "csrc/kernels/arithmetic/digest.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::DigestPiece;
using testing::Array;
using testing::kCpu;

const size_t kDigestSizes[] = {0, 1, 3, 31, 32, 33, 511, 512, 513, 1023, 1024, 1025, 4096, 5001, size_t{1} << 20};

uint64_t digest_of(const void* data, size_t num_bytes) {
  const DigestPiece piece{data, num_bytes};
  uint64_t result = 1000;  // is added to
  kernels::digest(&piece, 1, &result, kCpu);
  return result - 1000;
}
uint64_t digest_of(const std::vector<uint8_t>& bytes) { return digest_of(bytes.data(), bytes.size()); }

uint64_t published_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
uint32_t published_key(uint32_t place) {
  uint32_t x = place + 0x9e3779b9;
  x = (x ^ (x >> 16)) * 0x85ebca6b;
  x = (x ^ (x >> 13)) * 0xc2b2ae35;
  return x ^ (x >> 16);
}

uint64_t defined_digest(const uint8_t* data, size_t num_bytes) {
  const auto word = [=](size_t index) {
    uint32_t value = 0;
    for (size_t byte = 4 * index; byte < 4 * index + 4; ++byte) {
      if (byte < num_bytes) value |= static_cast<uint32_t>(data[byte]) << (8 * (byte % 4));
    }
    return value;
  };
  uint64_t digest = published_mix(num_bytes ^ 0xd1b54a32d192ed03);
  for (size_t block = 0; 1024 * block < num_bytes; ++block) {
    uint64_t products = 0;
    uint32_t words = 0;
    for (uint32_t j = 0; j < 128; ++j) {
      const uint32_t low = word(256 * block + j), high = word(256 * block + j + 128);
      products += static_cast<uint64_t>(low ^ published_key(j)) * (high ^ published_key(j + 128));
      words += low + high;
    }
    digest += published_mix(published_mix(products + (block + 1) * 0x9e3779b97f4a7c15) + words);
  }
  return digest;
}

std::vector<uint8_t> digest_input(size_t num_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(num_bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Digest, EqualsTheDefinition) {
  for (size_t num_bytes : kDigestSizes) {
    for (size_t offset : {0, 1, 2, 3, 4, 16}) {
      for (int fill : {0x00, 0xff, -1}) {
        Array array(num_bytes, offset);
        const std::vector<uint8_t> random = digest_input(num_bytes, num_bytes + offset);
        for (size_t i = 0; i < num_bytes; ++i) array.data()[i] = fill < 0 ? random[i] : static_cast<uint8_t>(fill);
        ASSERT_EQ(digest_of(array.data(), num_bytes), defined_digest(array.data(), num_bytes))
            << num_bytes << " + " << offset;
      }
    }
  }
}

TEST(Digest, MixesAsPublished) {
  EXPECT_EQ(kernels::digest_mix(0x9e3779b97f4a7c15), 0xe220a8397b1dcdafu);  // SplitMix64's first number from seed 0
  EXPECT_EQ(kernels::digest_key(1 - 0x9e3779b9u), 0x514e28b7u);             // MurmurHash3_x86_32 of "" with seed 1
}

// All digests of one array and of what a bit makes of it are different ones.
TEST(Digest, EveryBitCounts) {
  for (size_t num_bytes : {size_t{1}, size_t{3}, size_t{33}, size_t{1024}, size_t{2050}}) {
    for (bool is_zero : {true, false}) {
      std::vector<uint8_t> bytes = is_zero ? std::vector<uint8_t>(num_bytes) : digest_input(num_bytes, num_bytes);
      std::set<uint64_t> found{digest_of(bytes)};
      for (size_t bit = 0; bit < 8 * num_bytes; ++bit) {
        const auto flip = static_cast<uint8_t>(1u << (bit % 8));
        bytes[bit / 8] ^= flip;
        ASSERT_TRUE(found.insert(digest_of(bytes)).second) << "bit " << bit << " of " << num_bytes << " bytes";
        bytes[bit / 8] ^= flip;
      }
    }
  }
}

// Elements of `item` bytes at any two places, a few of them side by side; whole blocks too.
TEST(Digest, ExchangedElementsCount) {
  constexpr size_t kNumBytes = 8192;
  std::mt19937_64 random(7);
  for (size_t item : {size_t{1}, size_t{2}, size_t{4}, size_t{8}, size_t{512}, size_t{1024}}) {
    const size_t numel = kNumBytes / item;
    for (size_t trial = 0; trial < 1000; ++trial) {
      std::vector<uint8_t> bytes = digest_input(kNumBytes, trial);
      const size_t a = random() % numel, b = trial % 3 == 0 ? (a + 1) % numel : random() % numel;
      const uint64_t before = digest_of(bytes);
      const std::vector<uint8_t> original = bytes;
      std::swap_ranges(bytes.data() + a * item, bytes.data() + (a + 1) * item, bytes.data() + b * item);
      if (bytes == original) continue;
      ASSERT_NE(digest_of(bytes), before) << item << " bytes at " << a << " and " << b;
    }
  }
}

// The signs of two elements, and one number that is added to two and taken from a third.
TEST(Digest, ChangesThatAddUpToNothingCount) {
  constexpr size_t kNumWords = 1024;
  std::mt19937_64 random(8);
  for (size_t trial = 0; trial < 3000; ++trial) {
    std::vector<uint8_t> bytes = digest_input(4 * kNumWords, trial);
    std::vector<uint32_t> words(kNumWords);
    std::memcpy(words.data(), bytes.data(), bytes.size());
    const uint64_t before = digest_of(bytes);
    const size_t at = random() % (kNumWords - 2);
    if (trial % 2 == 0) {
      words[at] ^= 0x80000000u;
      words[at + 1 + random() % (kNumWords - at - 1)] ^= 0x80000000u;
    } else {
      const auto delta = static_cast<uint32_t>(random() >> (32 + random() % 32)) + 1;
      words[at] += delta;
      words[at + 1] -= 2 * delta;
      words[at + 2] += delta;
    }
    ASSERT_NE(digest_of(words.data(), bytes.size()), before) << trial;
  }
}

TEST(Digest, ZerosAtTheEndCount) {
  const std::vector<uint8_t> zeros(2100);
  std::set<uint64_t> found;
  for (size_t num_bytes = 0; num_bytes <= zeros.size(); ++num_bytes) found.insert(digest_of(zeros.data(), num_bytes));
  EXPECT_EQ(found.size(), zeros.size() + 1);
}

TEST(Digest, OfManyPieces) {
  const std::vector<uint8_t> bytes = digest_input(5000, 1);
  std::vector<DigestPiece> pieces;
  for (size_t i = 0; i < 300; ++i) pieces.push_back({bytes.data() + i, i * 13});
  pieces.push_back({nullptr, 0});
  std::vector<uint64_t> digests(pieces.size(), 5);
  kernels::digest(pieces.data(), static_cast<int>(pieces.size()), digests.data(), kCpu);
  for (size_t i = 0; i < pieces.size(); ++i) {
    ASSERT_EQ(digests[i] - 5, defined_digest(static_cast<const uint8_t*>(pieces[i].data), pieces[i].num_bytes)) << i;
  }
}

}  // namespace
}  // namespace bagua

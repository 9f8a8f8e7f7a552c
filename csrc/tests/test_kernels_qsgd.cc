// The stochastic quantiser: bit for bit against the formula of its header written as a loop over elements, for every
// type and in a mode that flushes subnormal numbers, and what the formula promises: no bias, no codes beyond the
// levels.
#include "csrc/kernels/qsgd.h"

#include <algorithm>
#include <cmath>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kBlockNumel;
using kernels::qsgd_wire_bytes;
using testing::Array;
using testing::expect_floats;
using testing::fill_random;
using testing::FlushToZero;
using testing::kCpu;
using testing::kEncodable;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::random_finite_bits;
using testing::random_values;
using testing::same_bits;
using testing::scaled;
using testing::store_real;

constexpr int kBits[] = {8, 4, 2};

double levels(int bits) { return bits == 8 ? 127 : bits == 4 ? 7 : 1; }
float scale_of(float norm) { return norm < 0x1p-100f ? 0x1p100f : 1.0f; }

// The number drawn for element i of a block of n (rounded up) elements, 0 to 2^15 - 1.
uint32_t draw(uint64_t block_key, size_t i, size_t n) {
  const bool is_upper = i >= n / 2;
  uint32_t x = static_cast<uint32_t>(is_upper ? i - n / 2 : i) * 0x9e3779b1u + static_cast<uint32_t>(block_key);
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x ^= static_cast<uint32_t>(block_key >> 32);
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return is_upper ? x >> 17 : x & 0x7fff;
}

struct QsgdOracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite_blocks = 0;
};

QsgdOracle oracle(int bits, const std::vector<float>& values, uint64_t key, uint64_t first) {
  QsgdOracle result;
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const size_t count = std::min(kBlockNumel, values.size() - begin);
    const size_t unit = bits == 2 ? 4 : 2, n = (count + unit - 1) / unit * unit;
    const uint64_t block_key = derive_key(key, (first + begin) / kBlockNumel);
    float norm = 0;
    bool finite = true, only_negative_zeros = true;
    for (size_t i = 0; i < count; ++i) {
      finite = finite && std::isfinite(values[begin + i]);
      norm = std::max(norm, std::fabs(values[begin + i]));
      only_negative_zeros = only_negative_zeros && values[begin + i] == 0 && std::signbit(values[begin + i]);
    }
    if (only_negative_zeros) norm = -0.0f;
    if (!finite) norm = std::bit_cast<float>(0x7fc00000u);
    result.num_nonfinite_blocks += !finite;
    const double L = levels(bits);
    const float s = scale_of(norm);
    const float units = static_cast<float>(L * 32768 / (static_cast<double>(norm) * static_cast<double>(s)));
    const float step = static_cast<float>(static_cast<double>(norm) * static_cast<double>(s) / L);
    std::vector<int> codes(n, static_cast<int>(finite && norm != 0 ? L : 0));
    for (size_t i = 0; i < count; ++i) {
      const float x = values[begin + i];
      if (!finite || norm == 0) {
        result.decoded.push_back(norm);
        continue;
      }
      double code = std::floor((std::nearbyint(x * s * units) + draw(block_key, i, n)) / 32768.0);
      EXPECT_LE(std::fabs(code), L) << "the header says that it needs no clamp";
      if (std::fabs(x) == norm) code = std::copysign(L, x);
      codes[i] = static_cast<int>(code + L);
      const float value = static_cast<float>(code) * step / s;
      result.decoded.push_back(std::fabs(code) == L ? std::copysign(norm, static_cast<float>(code)) : value);
    }
    for (int byte = 0; byte < 4; ++byte) {
      result.bytes.push_back(static_cast<uint8_t>(std::bit_cast<uint32_t>(norm) >> 8 * byte));
    }
    const size_t per_byte = 8 / static_cast<size_t>(bits), part = n / per_byte;
    for (size_t j = 0; j < part; ++j) {
      int byte = 0;
      for (size_t k = 0; k < per_byte; ++k) byte |= codes[j + k * part] << (k * static_cast<size_t>(bits));
      result.bytes.push_back(static_cast<uint8_t>(byte));
    }
  }
  return result;
}

struct Case {
  int bits;
  DType dtype = DType::kF32;
  size_t skew = 0;  // of the bytes and of halves, in bytes; of f32 in elements
  CounterRng rng = {};
  bool flushes = false;  // run in a mode that takes subnormal numbers for zeros
};

// All three kernels.
void expect_oracle(const Case& one, const std::vector<float>& values) {
  SCOPED_TRACE(std::to_string(one.bits) + " bits, " + std::string(dtype_name(one.dtype)) + " x " +
               std::to_string(values.size()) + (one.flushes ? ", flushing" : ""));
  const QsgdOracle expected = oracle(one.bits, values, one.rng.key, one.rng.first);
  const size_t numel = values.size(), item = item_bytes(one.dtype);
  const size_t value_skew = one.dtype == DType::kF32 ? 4 * one.skew : one.skew;
  ASSERT_EQ(expected.bytes.size(), qsgd_wire_bytes(numel, one.bits));
  Array source(numel * item, value_skew), bytes(expected.bytes.size(), one.skew);
  Array decoded(numel * item, value_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(one.dtype, source.data(), i, values[i]);
  fill_random(DType::kF32, sums.data(), numel, 40);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  uint64_t num_nonfinite_blocks = 5;
  {
    const auto mode = one.flushes ? std::make_unique<FlushToZero>() : nullptr;
    kernels::kQsgd.encode(one.bits, one.dtype, source.data(), numel, bytes.data(), one.rng, &num_nonfinite_blocks,
                          kCpu);
    kernels::kQsgd.decode(one.bits, one.dtype, bytes.data(), numel, decoded.data(), kCpu);
    kernels::kQsgd.decode_add(one.bits, bytes.data(), numel, sums.as<float>(), kCpu);
  }
  EXPECT_EQ(num_nonfinite_blocks, 5 + expected.num_nonfinite_blocks);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  expect_floats(one.dtype, decoded, expected.decoded);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(Qsgd, IsTheFormula) {
  for (int bits : kBits) {
    for (DType dtype : kEncodable) {
      for (size_t skew : {0, 1, 3}) {
        for (size_t numel : kSmallSizes) {
          expect_oracle({bits, dtype, skew, {numel, 0}}, random_values(dtype, numel, numel));
        }
        expect_oracle({bits, dtype, skew, {99, 7 * kBlockNumel}}, random_values(dtype, 3 * kBlockNumel + 77, 41));
      }
      expect_oracle({bits, dtype, 1, {42, 0}}, random_values(dtype, kLargeSize, 42));
    }
  }
}

// Around the norms that a power of two scales, the smallest normal and the smallest number.
TEST(Qsgd, EveryMagnitude) {
  for (int bits : kBits) {
    for (int exponent = -149; exponent < 120; ++exponent) {
      const std::vector<float> values = random_values(DType::kF32, kBlockNumel + 77, 5);
      expect_oracle({bits, DType::kF32, 0, {99, 0}}, scaled(values, std::ldexp(1.0f, exponent)));
    }
  }
}

TEST(Qsgd, RandomBitPatterns) {
  for (int bits : kBits) {
    for (DType dtype : kEncodable) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        expect_oracle({bits, dtype, 1, {seed, 0}}, random_finite_bits(dtype, 3000, seed));
      }
    }
  }
}

// Numbers beside the norm are where rounding could lead past the last level.
TEST(Qsgd, NoCodeExceedsTheLevels) {
  std::mt19937 random(43);
  for (int bits : kBits) {
    for (uint64_t round = 0; round < 100; ++round) {
      float norm;
      do norm = std::fabs(std::bit_cast<float>(static_cast<uint32_t>(random())));
      while (!std::isfinite(norm));
      std::vector<float> values(kBlockNumel, std::nextafter(norm, 0.0f));
      for (size_t i = 0; i < values.size(); i += 2) values[i] = -values[i];
      values[round] = norm;
      expect_oracle({bits, DType::kF32, 0, {round, 0}}, values);
    }
  }
}

// The kernels do not compare to the norm: the contract's formula has to lead to the last level by itself, whatever is
// drawn. A power of two changes nothing, so all mantissas are all norms.
TEST(Qsgd, ANormIsAtTheLastLevel) {
  for (int bits : kBits) {
    const int L = levels(bits);
    size_t num_wrong = 0;
    for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
      const float norm = std::bit_cast<float>(0x3f800000u | mantissa);
      const float units = static_cast<float>(L * 32768 / static_cast<double>(norm));
      num_wrong += std::nearbyint(norm * units) != static_cast<float>(L * 32768);
    }
    EXPECT_EQ(num_wrong, 0u);
  }
  // And they do it: blocks of a norm of either sign, with draws of their own.
  for (int bits : kBits) {
    std::vector<float> values = random_finite_bits(DType::kF32, 1000, 44);
    for (uint64_t i = 0; i < values.size(); ++i) expect_oracle({bits, DType::kF32, 0, {i, 0}}, {values[i], -values[i]});
  }
}

TEST(Qsgd, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (int bits : kBits) {
    for (size_t numel : {size_t{1}, size_t{5}, kBlockNumel, kBlockNumel + 1}) {
      for (float value : {0.0f, -0.0f, 1.0f, -1.0f / 3, huge, -huge, tiny, -tiny, nan, HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        expect_oracle({bits, DType::kF32, 1, {3, 0}}, values);
        for (size_t i = 0; i < numel; i += 2) values[i] = -value;  // zeros of both signs are all +0
        expect_oracle({bits, DType::kF32, 1, {3, 0}}, values);
        values[numel / 2] = 1;
        expect_oracle({bits, DType::kF32, 0, {3, 0}}, values);
        values.back() = -tiny;
        expect_oracle({bits, DType::kF32, 0, {3, 0}}, values);
      }
    }
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const float largest = static_cast<float>(testing::half_format(dtype).largest);
      for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
        std::vector<float> values(kBlockNumel + 9, value);
        expect_oracle({bits, dtype, 1, {3, 0}}, values);
        values[1000] = 1;
        expect_oracle({bits, dtype, 1, {3, 0}}, values);
      }
    }
  }
}

// The oracle itself runs in the usual mode.
TEST(Qsgd, FlushToZeroChangesNothing) {
  if (!FlushToZero::kIsPossible) GTEST_SKIP() << "this processor has no such mode that the test knows";
  for (int bits : kBits) {
    for (DType dtype : kEncodable) {
      for (size_t numel : {size_t{1}, size_t{33}, 2 * kBlockNumel + 77}) {
        for (float factor : {1.0f, 1e-27f, 1e-30f, 1e-36f, 1e-38f, 1e-40f, 1e-43f, 1e-45f}) {
          std::vector<float> values = scaled(random_values(DType::kF32, numel, 44), factor);
          for (float& value : values) {
            uint8_t narrow[8];
            store_real(dtype, narrow, 0, value);
            value = static_cast<float>(testing::load_real(dtype, narrow, 0));
          }
          expect_oracle({bits, dtype, 1, {numel, 0}, /*flushes=*/true}, values);
        }
      }
      expect_oracle({bits, dtype, 1, {7, 0}, /*flushes=*/true}, random_finite_bits(dtype, 3000, 45));
    }
  }
}

// The mean of N encodings comes closer to the values as 1 / sqrt(N): each is off by at most half a step (a coin between
// two neighbours), so the mean by 5 of its deviations in one of 2 million cases.
TEST(Qsgd, HasNoBias) {
  constexpr size_t kNumel = 2 * kBlockNumel + 100;
  const std::vector<float> values = random_values(DType::kF32, kNumel, 11);
  for (int bits : kBits) {
    std::vector<double> sums(kNumel);
    double sum_of_all = 0;
    std::vector<uint8_t> bytes(qsgd_wire_bytes(kNumel, bits));
    std::vector<float> decoded(kNumel);
    constexpr int kTimes = 4096;
    for (uint64_t key = 0; key < kTimes; ++key) {
      kernels::kQsgd.encode(bits, DType::kF32, values.data(), kNumel, bytes.data(), {key, 0}, nullptr, kCpu);
      kernels::kQsgd.decode(bits, DType::kF32, bytes.data(), kNumel, decoded.data(), kCpu);
      for (size_t i = 0; i < kNumel; ++i) sums[i] += decoded[i];
    }
    for (size_t begin = 0; begin < kNumel; begin += kBlockNumel) {
      float norm = 0;
      const size_t end = std::min(begin + kBlockNumel, kNumel);
      for (size_t i = begin; i < end; ++i) norm = std::max(norm, std::fabs(values[i]));
      const double step = norm / levels(bits);
      for (size_t i = begin; i < end; ++i) {
        const double error = sums[i] / kTimes - values[i];
        ASSERT_LE(std::fabs(error), 5.5 * step / 2 / std::sqrt(kTimes)) << bits << " bits at " << i;
        sum_of_all += error / step;
      }
    }
    EXPECT_LE(std::fabs(sum_of_all / kNumel), 5.0 / 2 / std::sqrt(kTimes * kNumel)) << bits;
  }
}

// Neighbours, halves of a hash and blocks draw independently: the errors of pairs do not go together.
TEST(Qsgd, DrawsAreIndependent) {
  constexpr size_t kNumel = 512 * kBlockNumel;
  std::vector<float> values(kNumel, 0.5f), decoded(kNumel);
  for (size_t i = 0; i < kNumel; i += kBlockNumel) values[i] = 1;  // the norm; the others are half a step of 2 bits
  std::vector<uint8_t> bytes(qsgd_wire_bytes(kNumel, 2));
  for (uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    kernels::kQsgd.encode(2, DType::kF32, values.data(), kNumel, bytes.data(), {key, 0}, nullptr, kCpu);
    kernels::kQsgd.decode(2, DType::kF32, bytes.data(), kNumel, decoded.data(), kCpu);
    for (size_t distance : {size_t{1}, size_t{2}, size_t{512}, size_t{1024}, kBlockNumel, 3 * kBlockNumel}) {
      double sum = 0, count = 0;
      for (size_t i = 0; i + distance < kNumel; ++i) {
        if (i % kBlockNumel == 0 || (i + distance) % kBlockNumel == 0) continue;
        sum += (decoded[i] > 0.25 ? 1 : -1) * (decoded[i + distance] > 0.25 ? 1 : -1);
        ++count;
      }
      EXPECT_LE(std::fabs(sum / count), 5 / std::sqrt(count)) << "distance " << distance << ", key " << key;
    }
  }
}

TEST(Qsgd, RejectsOtherBits) {
  float x = 1;
  uint8_t bytes[64];
  testing::expect_invalid_argument([&] { kernels::kQsgd.encode(3, DType::kF32, &x, 1, bytes, {}, nullptr, kCpu); },
                                   "bits is 3, expected 8, 4 or 2");
  testing::expect_invalid_argument(
      [&] {
        kernels::kQsgd.encode(8, DType::kF32, &x, 1, bytes, {0, 5}, nullptr, kCpu);
      },
      "begins at element 5");
}

}  // namespace
}  // namespace bagua

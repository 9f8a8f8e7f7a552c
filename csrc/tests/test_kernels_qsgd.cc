// The stochastic quantiser: bit for bit against the formula of its header written as a loop over elements, and what the
// formula promises: no bias, less than a step of error, the same codes however a message is cut.
#include "csrc/kernels/qsgd.h"

#include <algorithm>
#include <cmath>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kQsgdBlockNumel;
using kernels::qsgd_wire_bytes;
using testing::Array;
using testing::fill_random;
using testing::kSmallSizes;
using testing::same_bits;

constexpr Stream kCpu{};
constexpr int kBits[] = {8, 4, 2};

double levels(int bits) { return bits == 8 ? 127 : bits == 4 ? 7 : 1; }
float scale_of(float norm) { return norm < 0x1p-100f ? 0x1p100f : 1.0f; }

// What element i of a block of n (rounded up) elements draws, 0 to 2^15 - 1.
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

struct Oracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
};

Oracle oracle(int bits, const std::vector<float>& values, uint64_t key, uint64_t first) {
  Oracle result;
  for (size_t begin = 0; begin < values.size(); begin += kQsgdBlockNumel) {
    const size_t count = std::min(kQsgdBlockNumel, values.size() - begin);
    const size_t unit = bits == 2 ? 4 : 2, n = (count + unit - 1) / unit * unit;
    const uint64_t block_key = derive_key(key, (first + begin) / kQsgdBlockNumel);
    float norm = 0;
    bool finite = true, only_negative_zeros = true;
    for (size_t i = 0; i < count; ++i) {
      finite = finite && std::isfinite(values[begin + i]);
      norm = std::max(norm, std::fabs(values[begin + i]));
      only_negative_zeros = only_negative_zeros && values[begin + i] == 0 && std::signbit(values[begin + i]);
    }
    if (only_negative_zeros) norm = -0.0f;
    if (!finite) norm = std::bit_cast<float>(0x7fc00000u);
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
      code = std::clamp(code, -L, L);
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

std::vector<float> random_values(size_t numel, uint64_t seed, float scale = 1) {
  std::vector<float> values(numel);
  fill_random(DType::kF32, reinterpret_cast<uint8_t*>(values.data()), numel, seed);
  for (float& value : values) value *= scale;
  return values;
}

void expect_oracle(int bits, const std::vector<float>& values, uint64_t key, uint64_t first) {
  const Oracle expected = oracle(bits, values, key, first);
  ASSERT_EQ(expected.bytes.size(), qsgd_wire_bytes(values.size(), bits));
  Array bytes(expected.bytes.size(), 1), decoded(values.size() * 4, 4);
  kernels::qsgd_encode(bits, DType::kF32, values.data(), values.size(), bytes.data(), {key, first}, nullptr, kCpu);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size())) << bits << " bits";
  kernels::qsgd_decode(bits, DType::kF32, bytes.data(), values.size(), decoded.data(), kCpu);
  for (size_t i = 0; i < values.size(); ++i) {
    const float got = decoded.as<float>()[i], want = expected.decoded[i];
    ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(want))
        << bits << " bits at " << i << ": " << got << " instead of " << want;
  }
  bytes.expect_canary();
  decoded.expect_canary();
}

TEST(Qsgd, IsTheFormula) {
  for (int bits : kBits) {
    for (size_t numel : kSmallSizes) expect_oracle(bits, random_values(numel, numel), numel, 0);
    for (float scale : {1.0f, 1e-42f, 1e-35f, 1e-20f, 1e30f}) {
      expect_oracle(bits, random_values(3 * kQsgdBlockNumel + 77, 5, scale), 99, 7 * kQsgdBlockNumel);
    }
  }
}

TEST(Qsgd, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (int bits : kBits) {
    for (size_t numel : {size_t{1}, size_t{5}, kQsgdBlockNumel}) {
      for (float value : {0.0f, -0.0f, 1.0f, -1.0f / 3, huge, -huge, tiny, -tiny, nan, HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        expect_oracle(bits, values, 3, 0);
        values[numel / 2] = 1;
        expect_oracle(bits, values, 3, 0);
      }
    }
  }
}

// The mean of N encodings comes closer to the values as 1 / sqrt(N): each is off by at most half a step (a coin between
// two neighbours), so the mean by 5 of its deviations in one of 2 million cases.
TEST(Qsgd, HasNoBias) {
  constexpr size_t kNumel = 2 * kQsgdBlockNumel + 100;
  const std::vector<float> values = random_values(kNumel, 11);
  for (int bits : kBits) {
    std::vector<double> sums(kNumel);
    double sum_of_all = 0;
    std::vector<uint8_t> bytes(qsgd_wire_bytes(kNumel, bits));
    std::vector<float> decoded(kNumel);
    constexpr int kTimes = 4096;
    for (uint64_t key = 0; key < kTimes; ++key) {
      kernels::qsgd_encode(bits, DType::kF32, values.data(), kNumel, bytes.data(), {key, 0}, nullptr, kCpu);
      kernels::qsgd_decode(bits, DType::kF32, bytes.data(), kNumel, decoded.data(), kCpu);
      for (size_t i = 0; i < kNumel; ++i) sums[i] += decoded[i];
    }
    for (size_t begin = 0; begin < kNumel; begin += kQsgdBlockNumel) {
      float norm = 0;
      const size_t end = std::min(begin + kQsgdBlockNumel, kNumel);
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
  constexpr size_t kNumel = 512 * kQsgdBlockNumel;
  std::vector<float> values(kNumel, 0.5f), decoded(kNumel);
  for (size_t i = 0; i < kNumel; i += kQsgdBlockNumel) values[i] = 1;  // the norm; the others are half a step of 2 bits
  std::vector<uint8_t> bytes(qsgd_wire_bytes(kNumel, 2));
  for (uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    kernels::qsgd_encode(2, DType::kF32, values.data(), kNumel, bytes.data(), {key, 0}, nullptr, kCpu);
    kernels::qsgd_decode(2, DType::kF32, bytes.data(), kNumel, decoded.data(), kCpu);
    for (size_t distance : {size_t{1}, size_t{2}, size_t{512}, size_t{1024}, kQsgdBlockNumel, 3 * kQsgdBlockNumel}) {
      double sum = 0, count = 0;
      for (size_t i = 0; i + distance < kNumel; ++i) {
        if (i % kQsgdBlockNumel == 0 || (i + distance) % kQsgdBlockNumel == 0) continue;
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
  testing::expect_invalid_argument([&] { kernels::qsgd_encode(3, DType::kF32, &x, 1, bytes, {}, nullptr, kCpu); },
                                   "bits is 3, expected 8, 4 or 2");
  testing::expect_invalid_argument(
      [&] {
        kernels::qsgd_encode(8, DType::kF32, &x, 1, bytes, {0, 5}, nullptr, kCpu);
      },
      "begins at element 5");
}

}  // namespace
}  // namespace bagua

// The sign quantiser: bit for bit against the formula of its header written as a loop over elements, for every type,
// and what the formula promises: blocks of one value are exact, what is lost is |x|^2 - |x|_1^2 / elements.
#include "csrc/kernels/onebit.h"

#include <algorithm>
#include <cmath>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kBlockNumel;
using kernels::onebit_wire_bytes;
using testing::Array;
using testing::expect_floats;
using testing::fill_random;
using testing::kCpu;
using testing::kEncodable;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::random_finite_bits;
using testing::random_values;
using testing::same_bits;
using testing::store_real;

struct Oracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite_blocks = 0;
};

Oracle oracle(const std::vector<float>& values) {
  Oracle result;
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const size_t count = std::min(kBlockNumel, values.size() - begin);
    const float* x = values.data() + begin;
    double lanes[64] = {};
    bool finite = true;
    for (size_t i = 0; i < count; ++i) {
      lanes[i % 64] += std::fabs(static_cast<double>(x[i]));
      finite = finite && std::isfinite(x[i]);
    }
    for (size_t distance : {32, 16, 8, 4, 2, 1}) {
      for (size_t lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
    }
    float scale = static_cast<float>(lanes[0] / static_cast<double>(count));
    if (!finite) scale = std::bit_cast<float>(0x7fc00000u);
    for (int byte = 0; byte < 4; ++byte) {
      result.bytes.push_back(static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 8 * byte));
    }
    const size_t part = (count + 7) / 8, codes = result.bytes.size();
    result.bytes.resize(codes + part);
    for (size_t i = 0; i < count; ++i) {
      if (finite && std::signbit(x[i])) result.bytes[codes + i % part] |= static_cast<uint8_t>(1 << i / part);
      result.decoded.push_back(finite ? std::copysign(scale, x[i]) : scale);
    }
    result.num_nonfinite_blocks += !finite;
  }
  return result;
}

// All three kernels, on bytes and halves that are misaligned by `skew`.
void expect_oracle(DType dtype, const std::vector<float>& values, size_t skew) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + std::to_string(values.size()));
  const Oracle expected = oracle(values);
  const size_t numel = values.size(), float_skew = dtype == DType::kF32 ? 4 * skew : skew;
  ASSERT_EQ(expected.bytes.size(), onebit_wire_bytes(numel));
  Array source(numel * item_bytes(dtype), float_skew), bytes(expected.bytes.size(), skew);
  Array decoded(numel * item_bytes(dtype), float_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(dtype, source.data(), i, values[i]);
  uint64_t num_nonfinite_blocks = 5;
  kernels::kOnebit.encode(0, dtype, source.data(), numel, bytes.data(), {}, &num_nonfinite_blocks, kCpu);
  EXPECT_EQ(num_nonfinite_blocks, 5 + expected.num_nonfinite_blocks);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  kernels::kOnebit.decode(0, dtype, bytes.data(), numel, decoded.data(), kCpu);
  expect_floats(dtype, decoded, expected.decoded);
  fill_random(DType::kF32, sums.data(), numel, 40);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  kernels::kOnebit.decode_add(0, bytes.data(), numel, sums.as<float>(), kCpu);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(Onebit, IsTheFormula) {
  for (DType dtype : kEncodable) {
    for (size_t skew : {0, 1, 3}) {
      for (size_t numel : kSmallSizes) expect_oracle(dtype, random_values(dtype, numel, numel), skew);
      for (size_t numel : {7, 8, 9, 3 * 2048 + 77}) {
        expect_oracle(dtype, random_values(dtype, numel, 41), skew);
      }
    }
    expect_oracle(dtype, random_values(dtype, kLargeSize, 42), 1);
  }
}

TEST(Onebit, RandomBitPatterns) {
  for (DType dtype : kEncodable) {
    for (uint64_t seed = 0; seed < 20; ++seed) expect_oracle(dtype, random_finite_bits(dtype, 3000, seed), 1);
  }
}

TEST(Onebit, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (size_t numel : {size_t{1}, size_t{5}, kBlockNumel, kBlockNumel + 1}) {
    for (float value : {0.0f, -0.0f, 1.0f, -1.0f / 3, huge, -huge, tiny, -tiny, nan, -nan, HUGE_VALF, -HUGE_VALF}) {
      std::vector<float> values(numel, value);
      expect_oracle(DType::kF32, values, 1);
      values[numel / 2] = 1;
      expect_oracle(DType::kF32, values, 0);
      values.back() = -tiny;
      expect_oracle(DType::kF32, values, 0);
    }
  }
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const float largest = static_cast<float>(testing::half_format(dtype).largest);
    for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
      std::vector<float> values(kBlockNumel + 9, value);
      expect_oracle(dtype, values, 1);
      values[1000] = 1;
      expect_oracle(dtype, values, 1);
    }
  }
}

TEST(Onebit, BlocksOfOneValueAreExact) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (float value : {0.0f, -0.0f, 1.0f, -3.3f, 1e-30f, 0x1p-149f, -0x1p-149f, 0x1p-126f, kMax, -kMax}) {
    for (size_t numel : {1, 7, 2047, 2500}) {
      const std::vector<float> values(numel, value);
      std::vector<uint8_t> bytes(onebit_wire_bytes(numel));
      std::vector<float> decoded(numel);
      kernels::kOnebit.encode(0, DType::kF32, values.data(), numel, bytes.data(), {}, nullptr, kCpu);
      kernels::kOnebit.decode(0, DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
      EXPECT_TRUE(same_bits(decoded.data(), values.data(), 4 * numel)) << value;
    }
  }
}

// The sum of (|x| - mean)^2 is |x|^2 - |x|_1^2 / elements, so never more than (1 - 1 / elements) |x|^2.
TEST(Onebit, LosesWhatTheContractionSays) {
  for (size_t numel : {1, 2, 100, 2048}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      const std::vector<float> values = random_values(DType::kF32, numel, seed);
      std::vector<uint8_t> bytes(onebit_wire_bytes(numel));
      std::vector<float> decoded(numel);
      kernels::kOnebit.encode(0, DType::kF32, values.data(), numel, bytes.data(), {}, nullptr, kCpu);
      kernels::kOnebit.decode(0, DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
      double lost = 0, squares = 0, magnitudes = 0;
      for (size_t i = 0; i < numel; ++i) {
        const double x = values[i], error = x - static_cast<double>(decoded[i]);
        lost += error * error;
        squares += x * x;
        magnitudes += std::fabs(x);
      }
      const double n = static_cast<double>(numel);
      EXPECT_NEAR(lost, squares - magnitudes * magnitudes / n, 1e-6 * squares);
      EXPECT_LE(lost, (1 - 1 / n) * squares + 1e-6 * squares);
    }
  }
}

// Only a damaged message holds a negative scale or an Inf.
TEST(Onebit, DamagedScales) {
  uint8_t bytes[5] = {0, 0, 0x80, 0x3f, 0b10};  // 1.0; one of two is negative: n is 8, a bit per element
  float decoded[2];
  for (uint8_t upper : {0x3f, 0xbf}) {
    bytes[3] = upper;
    kernels::kOnebit.decode(0, DType::kF32, bytes, 2, decoded, kCpu);
    EXPECT_EQ(decoded[0], 1);
    EXPECT_EQ(decoded[1], -1);
  }
  for (uint8_t upper : {0x7f, 0xff}) {
    bytes[3] = upper;
    kernels::kOnebit.decode(0, DType::kF32, bytes, 2, decoded, kCpu);
    EXPECT_TRUE(std::isnan(decoded[0]) && std::isnan(decoded[1]));
  }
}

}  // namespace
}  // namespace bagua

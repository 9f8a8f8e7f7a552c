// The quantiser to four centroids: bit for bit against its header's definition in plain loops, over types, sizes and
// misalignments, and on the blocks that break sums and levels; and what it loses of the squares.
#include "csrc/kernels/centroid.h"

#include <algorithm>
#include <cmath>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::centroid_wire_bytes;
using kernels::kBlockNumel;
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

struct CentroidOracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite = 0;

  void add_f32(float value) {
    const uint32_t bits = std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
    for (int byte = 0; byte < 4; ++byte) bytes.push_back(static_cast<uint8_t>(bits >> 8 * byte));
  }
};

// The mean of numbers, in 64 lanes from -0 on.
double mean_of_lanes(const std::vector<double>& numbers) {
  double lanes[64];
  std::fill_n(lanes, 64, -0.0);
  for (size_t i = 0; i < numbers.size(); ++i) lanes[i % 64] += numbers[i];
  for (int step = 32; step >= 1; step /= 2) {
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  }
  return lanes[0] / static_cast<double>(numbers.size());
}

float clamped_to_f32(double value) {
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  return static_cast<float>(std::min(std::max(value, -largest), largest));
}

void add_block(const float* x, size_t count, CentroidOracle& result) {
  const bool finite = std::all_of(x, x + count, [](float value) { return std::isfinite(value); });
  const size_t part = (count + 3) / 4, codes_at = result.bytes.size() + 8;
  if (!finite) {
    for (int i = 0; i < 2; ++i) result.add_f32(std::nanf(""));
    result.bytes.resize(codes_at + part);
    result.decoded.insert(result.decoded.end(), count, std::nanf(""));
    ++result.num_nonfinite;
    return;
  }
  std::vector<double> numbers(x, x + count);
  const float mean = static_cast<float>(mean_of_lanes(numbers));
  for (double& number : numbers) number = (number - static_cast<double>(mean)) * (number - static_cast<double>(mean));
  const float sigma = static_cast<float>(std::sqrt(mean_of_lanes(numbers)));
  result.add_f32(mean);
  result.add_f32(sigma);
  result.bytes.resize(codes_at + part);
  const double center = static_cast<double>(mean), step = 1.5 * static_cast<double>(sigma);
  for (size_t i = 0; i < count; ++i) {
    int code = 0;
    for (double threshold : {center - step, center, center + step}) code += x[i] > static_cast<float>(threshold);
    result.bytes[codes_at + i % part] |= static_cast<uint8_t>(code << 2 * (i / part));
    result.decoded.push_back(clamped_to_f32(center + (code - 1.5) * step));
  }
}

// All three kernels, on bytes and halves that are misaligned by `skew`.
void expect_centroids(DType dtype, const std::vector<float>& values, size_t skew) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + std::to_string(values.size()));
  CentroidOracle expected;
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    add_block(values.data() + begin, std::min(kBlockNumel, values.size() - begin), expected);
  }
  const size_t numel = values.size(), float_skew = dtype == DType::kF32 ? 4 * skew : skew;
  ASSERT_EQ(expected.bytes.size(), centroid_wire_bytes(numel));
  Array source(numel * item_bytes(dtype), float_skew), bytes(expected.bytes.size(), skew);
  Array decoded(numel * item_bytes(dtype), float_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(dtype, source.data(), i, values[i]);
  uint64_t num_nonfinite = 5;
  kernels::kCentroid.encode(0, dtype, source.data(), numel, bytes.data(), {}, &num_nonfinite, kCpu);
  EXPECT_EQ(num_nonfinite, 5 + expected.num_nonfinite);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  std::vector<float> clamped = expected.decoded;
  for (float& value : clamped) {
    if (dtype == DType::kF32 || std::isnan(value)) continue;
    const float largest = static_cast<float>(testing::half_format(dtype).largest);
    value = std::min(std::max(value, -largest), largest);
  }
  kernels::kCentroid.decode(0, dtype, bytes.data(), numel, decoded.data(), kCpu);
  expect_floats(dtype, decoded, clamped);
  fill_random(DType::kF32, sums.data(), numel, 50);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  kernels::kCentroid.decode_add(0, bytes.data(), numel, sums.as<float>(), kCpu);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(Centroid, IsTheDefinition) {
  for (DType dtype : kEncodable) {
    for (size_t numel : kSmallSizes) {
      for (size_t skew : {0, 1, 2, 3}) expect_centroids(dtype, random_values(dtype, numel, numel + skew), skew);
    }
    for (size_t numel : {2, 5, 63, 64, 65, 3 * 2048 + 77}) expect_centroids(dtype, random_values(dtype, numel, 51), 1);
    expect_centroids(dtype, random_values(dtype, kLargeSize, 52), 3);
    for (uint64_t seed = 0; seed < 20; ++seed) expect_centroids(dtype, random_finite_bits(dtype, 5000, seed), 1);
  }
}

// They are blocks of one value, with outliers, far from 0, subnormal, and with sums and levels beyond the range of f32
// and of the type.
TEST(Centroid, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (size_t numel : {size_t{1}, size_t{5}, kBlockNumel, kBlockNumel + 1}) {
    for (float value : {0.0f, -0.0f, 1.0f, huge, -huge, tiny, -tiny, nan, -nan, HUGE_VALF, -HUGE_VALF}) {
      std::vector<float> values(numel, value);
      expect_centroids(DType::kF32, values, 1);
      for (float other : {1.0f, -tiny, huge, -huge, 0.0f}) {
        values[numel / 2] = other;
        expect_centroids(DType::kF32, values, 0);
        for (size_t i = 0; i < numel; i += 3) values[i] = other;
        expect_centroids(DType::kF32, values, 0);
      }
    }
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const float largest = static_cast<float>(testing::half_format(dtype).largest);
      for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        for (size_t i = 0; i < numel; i += 8) values[i] = i % 3 == 0 ? largest : 1;
        expect_centroids(dtype, values, 1);
      }
    }
  }
  std::vector<float> far = random_values(DType::kF32, 3000, 53);
  for (float& value : far) value += 1e6f;
  expect_centroids(DType::kF32, far, 0);
}

TEST(Centroid, ConstantsAreExact) {
  for (float value : {0.0f, -0.0f, 0.1f, -3e38f, 1e-45f}) {
    const std::vector<float> values(3000, value);
    std::vector<float> decoded(values.size());
    std::vector<uint8_t> bytes(centroid_wire_bytes(values.size()));
    kernels::kCentroid.encode(0, DType::kF32, values.data(), values.size(), bytes.data(), {}, nullptr, kCpu);
    kernels::kCentroid.decode(0, DType::kF32, bytes.data(), values.size(), decoded.data(), kCpu);
    EXPECT_TRUE(same_bits(values.data(), decoded.data(), values.size() * sizeof(float))) << value;
  }
}

double lost_part(const std::vector<float>& values) {
  std::vector<float> decoded(values.size());
  std::vector<uint8_t> bytes(centroid_wire_bytes(values.size()));
  kernels::kCentroid.encode(0, DType::kF32, values.data(), values.size(), bytes.data(), {}, nullptr, kCpu);
  kernels::kCentroid.decode(0, DType::kF32, bytes.data(), values.size(), decoded.data(), kCpu);
  double lost = 0, squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    lost += std::pow(static_cast<double>(values[i]) - static_cast<double>(decoded[i]), 2);
    squares += std::pow(static_cast<double>(values[i]), 2);
  }
  return lost / squares;
}

// The losses that the header gives: of Gaussian values, and the most, of one element among zeros.
TEST(Centroid, LossOfSquares) {
  std::mt19937_64 random(54);
  std::normal_distribution<float> normal;
  std::vector<float> values(200 * kBlockNumel);
  for (float& value : values) value = normal(random);
  EXPECT_NEAR(lost_part(values), 0.19, 0.002);
  std::vector<float> spike(kBlockNumel);
  spike[7] = 3;
  EXPECT_GT(lost_part(spike), 1);
  EXPECT_LE(lost_part(spike), 1.5625);
}

// A NaN or an Inf in either number of the header.
TEST(Centroid, DamagedMessages) {
  for (int at : {0, 4}) {
    for (float value : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      std::vector<uint8_t> bytes(centroid_wire_bytes(100), 0x5a);
      const float header[] = {1, 2};
      std::memcpy(bytes.data(), header, 8);
      std::memcpy(bytes.data() + at, &value, 4);
      std::vector<float> decoded(100), sums(100, 1.0f);
      kernels::kCentroid.decode(0, DType::kF32, bytes.data(), 100, decoded.data(), kCpu);
      kernels::kCentroid.decode_add(0, bytes.data(), 100, sums.data(), kCpu);
      for (size_t i = 0; i < 100; ++i) ASSERT_TRUE(std::isnan(decoded[i]) && std::isnan(sums[i])) << i;
    }
  }
}

}  // namespace
}  // namespace bagua

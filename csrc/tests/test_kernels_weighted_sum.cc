// The weighted sum against plain double loops: type x number of sources x numel x misalignment, in place at every
// source, fixed points, NaN and infinity, and the errors.
#include "csrc/kernels/weighted_sum.h"

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::expect_invalid_argument;
using testing::fill_random;
using testing::kCpu;
using testing::kFloats;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_real;
using testing::same_bits;
using testing::store_real;

// The definition: f64 sums in index order; f16 and bf16 results by way of f32.
double define(DType dtype, const std::vector<const void*>& sources, const std::vector<double>& weights, size_t i) {
  double sum = 0;
  for (size_t s = 0; s < sources.size(); ++s) {
    const double term = weights[s] * load_real(dtype, sources[s], i);
    sum = s == 0 ? term : sum + term;
  }
  return dtype == DType::kF64 ? sum : static_cast<double>(static_cast<float>(sum));
}

void check(DType dtype, size_t num_sources, size_t numel, size_t offset_bytes, int in_place_at) {
  const size_t item = item_bytes(dtype);
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<const void*> sources;
  std::vector<double> weights;
  for (size_t s = 0; s < num_sources; ++s) {
    arrays.push_back(std::make_unique<Array>(numel * item, offset_bytes));
    fill_random(dtype, arrays[s]->data(), numel, 17 * s + numel);
    sources.push_back(arrays[s]->data());
    weights.push_back(1.0 / static_cast<double>(s + 3));
  }
  Array expected(numel * item, offset_bytes), other(numel * item, offset_bytes);
  for (size_t i = 0; i < numel; ++i) store_real(dtype, expected.data(), i, define(dtype, sources, weights, i));
  Array& result = in_place_at >= 0 ? *arrays[static_cast<size_t>(in_place_at)] : other;
  kernels::weighted_sum(dtype, sources.data(), weights.data(), static_cast<int>(num_sources), result.data(), numel,
                        kCpu);
  EXPECT_TRUE(same_bits(result.data(), expected.data(), numel * item))
      << dtype_name(dtype) << " x" << numel << " of " << num_sources << " at " << offset_bytes;
  result.expect_canary();
}

TEST(WeightedSum, EqualsTheDefinition) {
  for (DType dtype : kFloats) {
    for (size_t numel : kSmallSizes) {
      for (size_t num_sources : {1, 2, 3, 5}) {
        for (size_t offset : {size_t{0}, item_bytes(dtype)}) {
          check(dtype, num_sources, numel, offset, -1);
          for (size_t s = 0; s < num_sources; ++s) check(dtype, num_sources, numel, offset, static_cast<int>(s));
        }
      }
    }
    check(dtype, 3, kLargeSize, 0, 1);
  }
}

// Ranks that agree stay as they are, whatever the weights.
TEST(WeightedSum, TheAverageOfEqualValuesIsThatValue) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    constexpr size_t kNumel = 5000;
    Array values(kNumel * item_bytes(dtype), 0), result(kNumel * item_bytes(dtype), 0);
    fill_random(dtype, values.data(), kNumel, 5);
    for (int n : {2, 3, 5, 7, 33}) {
      const std::vector<const void*> sources(static_cast<size_t>(n), values.data());
      const std::vector<double> weights(static_cast<size_t>(n), 1.0 / n);
      kernels::weighted_sum(dtype, sources.data(), weights.data(), n, result.data(), kNumel, kCpu);
      EXPECT_TRUE(same_bits(result.data(), values.data(), kNumel * item_bytes(dtype)))
          << dtype_name(dtype) << " of " << n;
    }
  }
}

TEST(WeightedSum, NanAndInfinityPropagate) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (DType dtype : kFloats) {
    Array a(3 * item_bytes(dtype), 0), b(3 * item_bytes(dtype), 0);
    for (size_t i = 0; i < 3; ++i) store_real(dtype, a.data(), i, 1.0);
    for (size_t i = 0; i < 3; ++i) store_real(dtype, b.data(), i, i == 0 ? nan : i == 1 ? inf : -inf);
    const void* sources[] = {a.data(), b.data()};
    const double weights[] = {0.5, 0.5};
    kernels::weighted_sum(dtype, sources, weights, 2, a.data(), 3, kCpu);
    EXPECT_TRUE(std::isnan(load_real(dtype, a.data(), 0)));
    EXPECT_EQ(load_real(dtype, a.data(), 1), inf);
    EXPECT_EQ(load_real(dtype, a.data(), 2), -inf);
  }
}

TEST(WeightedSum, RefusesWhatHasNoMeaning) {
  int32_t value = 1;
  const void* sources[] = {&value};
  const double weight = 1;
  expect_invalid_argument([&] { kernels::weighted_sum(DType::kI32, sources, &weight, 1, &value, 1, kCpu); }, "int32");
  expect_invalid_argument([&] { kernels::weighted_sum(DType::kF32, sources, &weight, 0, &value, 1, kCpu); },
                          "num_sources is 0");
}

}  // namespace
}  // namespace bagua

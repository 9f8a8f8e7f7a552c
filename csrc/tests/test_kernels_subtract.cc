// The subtraction against a plain loop: numel x misalignment of either side, random bit patterns, NaN and infinity.
#include "csrc/kernels/subtract.h"

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::expect_floats;
using testing::kCpu;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::random_finite_bits;
using testing::random_values;
using testing::same_bits;

// The skews are in elements.
void check(const std::vector<float>& from, const std::vector<float>& what, size_t from_skew, size_t what_skew) {
  const size_t numel = from.size();
  SCOPED_TRACE(std::to_string(numel) + " at " + std::to_string(from_skew) + " and " + std::to_string(what_skew));
  Array destination(numel * 4, 4 * from_skew), source(numel * 4, 4 * what_skew);
  std::vector<float> expected(numel);
  for (size_t i = 0; i < numel; ++i) {
    destination.as<float>()[i] = from[i];
    source.as<float>()[i] = what[i];
    expected[i] = from[i] - what[i];
  }
  kernels::subtract(destination.as<float>(), source.as<float>(), numel, kCpu);
  expect_floats(DType::kF32, destination, expected);
  destination.expect_canary();
  EXPECT_TRUE(same_bits(source.data(), what.data(), numel * 4));
}

TEST(Subtract, EqualsTheDefinition) {
  for (size_t from_skew : {0, 1, 3}) {
    for (size_t what_skew : {0, 1, 2}) {
      for (size_t numel : kSmallSizes) {
        check(random_values(DType::kF32, numel, 1), random_values(DType::kF32, numel, 2), from_skew, what_skew);
      }
    }
  }
  check(random_values(DType::kF32, kLargeSize, 3), random_values(DType::kF32, kLargeSize, 4), 1, 0);
  check(random_finite_bits(DType::kF32, 3000, 5), random_finite_bits(DType::kF32, 3000, 6), 0, 1);
}

// A value that was sent exactly leaves +0; NaN and infinity propagate.
TEST(Subtract, SpecialNumbers) {
  const float inf = HUGE_VALF, nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float numbers[] = {0.0f, -0.0f, 1.5f, -1.5f, tiny, -tiny, huge, -huge, inf, -inf, nan};
  std::vector<float> from, what;
  for (float a : numbers) {
    for (float b : numbers) {
      from.push_back(a);
      what.push_back(b);
    }
  }
  check(from, what, 0, 0);
}

}  // namespace
}  // namespace bagua

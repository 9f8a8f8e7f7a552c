// The search for NaN and infinity against a plain loop over doubles: dtype x numel x misalignment x stride, with one
// bad element at every offset that a tail or a block of the kernel could miss.
#include "csrc/kernels/nonfinite.h"

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::count_nonfinite;
using testing::Array;
using testing::kFloats;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_real;
using testing::random_finite_bits;
using testing::store_real;

size_t count_in_a_loop(DType dtype, const void* data, size_t numel, size_t stride) {
  size_t found = 0;
  for (size_t i = 0; i < numel; i += stride) found += !std::isfinite(load_real(dtype, data, i));
  return found;
}

void check(DType dtype, Array& array, size_t numel) {
  for (size_t stride : {size_t{1}, size_t{2}, size_t{2048}}) {
    ASSERT_EQ(count_nonfinite(dtype, array.data(), numel, stride), count_in_a_loop(dtype, array.data(), numel, stride))
        << dtype_name(dtype) << ", numel " << numel << ", stride " << stride;
  }
}

TEST(CountNonfinite, EqualsTheDefinition) {
  const double bad[] = {HUGE_VAL, -HUGE_VAL, std::nan("")};
  for (DType dtype : kFloats) {
    for (size_t skew : {0, 1, 3}) {
      for (size_t numel : kSmallSizes) {
        Array array(numel * item_bytes(dtype), skew * item_bytes(dtype));
        for (size_t i = 0; i < numel; ++i) store_real(dtype, array.data(), i, i % 7 - 3.0);
        check(dtype, array, numel);
        for (size_t offset : {size_t{0}, numel / 2, numel - 1}) {
          if (numel == 0) break;
          store_real(dtype, array.data(), offset, bad[offset % 3]);
          check(dtype, array, numel);
        }
        for (size_t i = 0; i < numel; ++i) store_real(dtype, array.data(), i, bad[i % 3]);
        check(dtype, array, numel);
      }
    }
  }
}

// Every element bad, more of them than a lane of 16 bits counts; and one alone, at the end.
TEST(CountNonfinite, LargeArrays) {
  for (DType dtype : kFloats) {
    Array array(kLargeSize * item_bytes(dtype), item_bytes(dtype));
    store_real(dtype, array.data(), kLargeSize - 1, std::nan(""));
    check(dtype, array, kLargeSize);
    for (size_t i = 0; i < kLargeSize; ++i) store_real(dtype, array.data(), i, HUGE_VAL);
    check(dtype, array, kLargeSize);
  }
}

// The largest finite values, subnormals and zeros of either sign are none, whatever the flush-to-zero mode says.
TEST(CountNonfinite, FiniteBits) {
  for (DType dtype : kFloats) {
    const std::vector<float> values = random_finite_bits(dtype == DType::kF64 ? DType::kF32 : dtype, 3000, 5);
    Array array(3002 * item_bytes(dtype), 0);
    for (size_t i = 0; i < 3000; ++i) store_real(dtype, array.data(), i, values[i]);
    if (dtype == DType::kF64) store_real(dtype, array.data(), 3000, std::numeric_limits<double>::max());
    store_real(dtype, array.data(), 3001, -0.0);
    const testing::FlushToZero mode;
    EXPECT_EQ(count_nonfinite(dtype, array.data(), 3002, 1), 0u) << dtype_name(dtype);
  }
}

TEST(CountNonfinite, RefusesWhatHasNoSuchNumbers) {
  int32_t value = 0;
  EXPECT_THROW(count_nonfinite(DType::kI32, &value, 1, 1), Error);
  EXPECT_THROW(count_nonfinite(DType::kF32, &value, 1, 0), Error);
}

}  // namespace
}  // namespace bagua

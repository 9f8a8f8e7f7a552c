// Reductions, scale and the dispatch seam against plain double loops: dtype x op x numel x misalignment,
// in place, NaN, integer wrap-around, and the errors.
#include "csrc/kernels/reduce.h"

#include "csrc/kernels/cast.h"
#include "csrc/kernels/half_codec.h"
#include "csrc/kernels/minmax_uint8.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::expect_invalid_argument;
using testing::fill_random;
using testing::kCpu;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_integer;
using testing::load_real;
using testing::same_bits;
using testing::store_integer;
using testing::store_real;

// f32 arithmetic done in f64 and rounded to f32 gives the f32 result for one +, * or /.
double round_step(DType dtype, double value) {
  return dtype == DType::kF64 ? value : static_cast<double>(static_cast<float>(value));
}

double apply_real(ReduceOp op, DType dtype, double a, double b) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return round_step(dtype, a + b);
  if (op == ReduceOp::kProduct) return round_step(dtype, a * b);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  if (op == ReduceOp::kMin) return a <= b ? a : b;
  return a >= b ? a : b;
}

int64_t apply_integer(ReduceOp op, int64_t a, int64_t b) {
  const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  switch (op) {
    case ReduceOp::kSum: return static_cast<int64_t>(x + y);
    case ReduceOp::kProduct: return static_cast<int64_t>(x * y);
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    case ReduceOp::kBand: return a & b;
    case ReduceOp::kBor: return a | b;
    case ReduceOp::kBxor: return a ^ b;
    case ReduceOp::kAvg: break;
  }
  ADD_FAILURE() << "AVG of integers";
  return 0;
}

// With average false, AVG is the sum, as reduce_into defines it.
void oracle(ReduceOp op, DType dtype, const std::vector<const void*>& sources, void* out, size_t numel, bool average) {
  for (size_t i = 0; i < numel; ++i) {
    if (is_floating(dtype)) {
      double value = load_real(dtype, sources[0], i);
      for (size_t s = 1; s < sources.size(); ++s) value = apply_real(op, dtype, value, load_real(dtype, sources[s], i));
      if (op == ReduceOp::kAvg && average) value = round_step(dtype, value / static_cast<double>(sources.size()));
      store_real(dtype, out, i, value);
    } else {
      int64_t value = load_integer(dtype, sources[0], i);
      for (size_t s = 1; s < sources.size(); ++s) {
        store_integer(dtype, out, i, apply_integer(op, value, load_integer(dtype, sources[s], i)));
        value = load_integer(dtype, out, i);
      }
      store_integer(dtype, out, i, value);
    }
  }
}

std::string describe(ReduceOp op, DType dtype, size_t numel) {
  return std::string(reduce_op_name(op)) + " " + std::string(dtype_name(dtype)) + " numel " + std::to_string(numel);
}

template <typename Body>
void for_each_defined(Body body) {
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const DType dtype = static_cast<DType>(t);
      const ReduceOp op = static_cast<ReduceOp>(o);
      if (is_defined(op, dtype)) body(op, dtype);
    }
  }
}

void check_reduce_into(ReduceOp op, DType dtype, size_t numel, size_t skew_elements) {
  SCOPED_TRACE(describe(op, dtype, numel));
  const size_t num_bytes = numel * item_bytes(dtype);
  Array acc(num_bytes, skew_elements * item_bytes(dtype)), source(num_bytes, 0), expected(num_bytes, 0);
  fill_random(dtype, acc.data(), numel, 1);
  fill_random(dtype, source.data(), numel, 2);
  oracle(op, dtype, {acc.data(), source.data()}, expected.data(), numel, false);
  kernels::reduce_into(op, dtype, acc.data(), source.data(), numel, kCpu);
  EXPECT_TRUE(same_bits(acc.data(), expected.data(), num_bytes));
  acc.expect_canary();
}

TEST(ReduceInto, EqualsTheOracle) {
  for_each_defined([](ReduceOp op, DType dtype) {
    for (size_t numel : kSmallSizes) {
      for (size_t skew : {0, 1, 3}) check_reduce_into(op, dtype, numel, skew);
    }
  });
  for (int t = 0; t < kNumDTypes; ++t) check_reduce_into(ReduceOp::kMax, static_cast<DType>(t), kLargeSize, 1);
}

TEST(ReduceInto, AccumulatorMayBeTheSource) {
  std::vector<float> values(1000, 1.5f);
  kernels::reduce_into(ReduceOp::kSum, DType::kF32, values.data(), values.data(), values.size(), kCpu);
  EXPECT_EQ(values, std::vector<float>(1000, 3.0f));
}

// Destinations: the first `num_in_place` sources themselves, then `num_others` arrays.
void check_reduce_many(ReduceOp op, DType dtype, size_t numel, int num_sources, int num_in_place, int num_others) {
  SCOPED_TRACE(describe(op, dtype, numel) + ", sources " + std::to_string(num_sources) + ", in place " +
               std::to_string(num_in_place) + ", others " + std::to_string(num_others));
  const size_t num_bytes = numel * item_bytes(dtype);
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  for (int s = 0; s < num_sources + num_others; ++s) {
    arrays.push_back(std::make_unique<Array>(num_bytes, static_cast<size_t>(s % 3) * item_bytes(dtype)));
    fill_random(dtype, arrays.back()->data(), numel, static_cast<uint64_t>(s) + 10);
    if (s < num_sources) sources.push_back(arrays.back()->data());
  }
  // From the last source backwards, so that the first destination is not always the first source.
  for (int s = num_sources - 1; s >= num_sources - num_in_place; --s) {
    destinations.push_back(arrays[static_cast<size_t>(s)]->data());
  }
  for (int d = 0; d < num_others; ++d) destinations.push_back(arrays[static_cast<size_t>(num_sources + d)]->data());
  Array expected(num_bytes, 0);
  oracle(op, dtype, sources, expected.data(), numel, true);
  kernels::reduce_many(op, dtype, sources.data(), num_sources, destinations.data(),
                       static_cast<int>(destinations.size()), numel, kCpu);
  for (void* destination : destinations) EXPECT_TRUE(same_bits(destination, expected.data(), num_bytes));
  for (const auto& array : arrays) array->expect_canary();
}

TEST(ReduceMany, EqualsTheOracleForEveryTypeAndOperator) {
  for_each_defined([](ReduceOp op, DType dtype) {
    for (size_t numel : kSmallSizes) check_reduce_many(op, dtype, numel, 3, 1, 1);
  });
}

TEST(ReduceMany, OneToFiveSourcesInPlaceAndElsewhere) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI8}) {
    const ReduceOp op = is_floating(dtype) ? ReduceOp::kAvg : ReduceOp::kSum;
    for (size_t numel : {size_t{1}, size_t{1000}, size_t{2049}, size_t{10001}}) {
      for (int num_sources = 1; num_sources <= 5; ++num_sources) {
        for (int num_in_place = 0; num_in_place <= num_sources; ++num_in_place) {
          for (int num_others : {0, 1, 2}) {
            check_reduce_many(op, dtype, numel, num_sources, num_in_place, num_others);
          }
        }
      }
    }
  }
}

TEST(ReduceMany, Large) {
  for (int num_sources : {2, 3, 4, 5}) {
    check_reduce_many(ReduceOp::kSum, DType::kF32, kLargeSize, num_sources, num_sources, 0);
    check_reduce_many(ReduceOp::kSum, DType::kF32, 10001, num_sources, 0, 3);
  }
  check_reduce_many(ReduceOp::kAvg, DType::kF32, kLargeSize, 2, 2, 0);
  check_reduce_many(ReduceOp::kAvg, DType::kF32, kLargeSize, 3, 3, 0);
  check_reduce_many(ReduceOp::kSum, DType::kBF16, kLargeSize, 2, 2, 0);
}

TEST(ReduceMany, HalfRoundsOnce) {
  // 2048 + 1 + 1 is 2050 in f32; rounding to f16 after each addition would stay at 2048.
  uint16_t sources[3] = {testing::half_bits(DType::kF16, 2048), testing::half_bits(DType::kF16, 1),
                         testing::half_bits(DType::kF16, 1)};
  const void* pointers[] = {&sources[0], &sources[1], &sources[2]};
  uint16_t result = 0;
  void* destinations[] = {&result};
  kernels::reduce_many(ReduceOp::kSum, DType::kF16, pointers, 3, destinations, 1, 1, kCpu);
  EXPECT_EQ(testing::half_value(DType::kF16, result), 2050.0);
}

TEST(Reduce, MinAndMaxPropagateNan) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      constexpr size_t kNumel = 67;
      for (size_t at = 0; at < kNumel; ++at) {
        Array a(kNumel * item_bytes(dtype), 0), b(kNumel * item_bytes(dtype), 0);
        fill_random(dtype, a.data(), kNumel, 3);
        fill_random(dtype, b.data(), kNumel, 4);
        store_real(dtype, at % 2 ? a.data() : b.data(), at, std::nan(""));
        kernels::reduce_into(op, dtype, a.data(), b.data(), kNumel, kCpu);
        for (size_t i = 0; i < kNumel; ++i) ASSERT_EQ(std::isnan(load_real(dtype, a.data(), i)), i == at);
      }
    }
  }
}

TEST(Reduce, IntegersWrap) {
  int8_t a8 = 127, b8 = 1;
  kernels::reduce_into(ReduceOp::kSum, DType::kI8, &a8, &b8, 1, kCpu);
  EXPECT_EQ(a8, -128);
  int32_t a32 = std::numeric_limits<int32_t>::max(), b32 = 2;
  kernels::reduce_into(ReduceOp::kProduct, DType::kI32, &a32, &b32, 1, kCpu);
  EXPECT_EQ(a32, -2);
  int64_t a64 = std::numeric_limits<int64_t>::min(), b64 = -1;
  kernels::reduce_into(ReduceOp::kSum, DType::kI64, &a64, &b64, 1, kCpu);
  EXPECT_EQ(a64, std::numeric_limits<int64_t>::max());
}

TEST(Scale, EqualsTheOracle) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
    for (double factor : {0.5, 1.0 / 3.0, 0.0, -7.0, 1e-3}) {
      for (size_t numel : kSmallSizes) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + " * " + std::to_string(factor));
        const size_t num_bytes = numel * item_bytes(dtype);
        Array data(num_bytes, item_bytes(dtype)), expected(num_bytes, 0);
        fill_random(dtype, data.data(), numel, 5);
        for (size_t i = 0; i < numel; ++i) {
          store_real(dtype, expected.data(), i, round_step(dtype, load_real(dtype, data.data(), i) * factor));
        }
        kernels::scale(dtype, data.data(), factor, numel, kCpu);
        EXPECT_TRUE(same_bits(data.data(), expected.data(), num_bytes));
        data.expect_canary();
      }
    }
  }
}

TEST(Reduce, AverageIsTheCorrectlyRoundedQuotient) {
  std::mt19937 random(6);
  for (int n : {3, 5, 6, 7, 11, 13, 48, 100, 127}) {
    std::vector<float> ones(4096), zeros(4096, 0.0f);
    for (float& value : ones) {
      value = std::ldexp(static_cast<float>(random() >> 8), static_cast<int>(random() % 60) - 30);
    }
    std::vector<const void*> sources(static_cast<size_t>(n), zeros.data());
    sources[0] = ones.data();
    std::vector<float> result(4096);
    void* destination = result.data();
    kernels::reduce_many(ReduceOp::kAvg, DType::kF32, sources.data(), n, &destination, 1, result.size(), kCpu);
    for (size_t i = 0; i < result.size(); ++i) ASSERT_EQ(result[i], ones[i] / static_cast<float>(n));
  }
}

TEST(Dispatch, UndefinedOperatorsAreNamed) {
  int32_t value = 0;
  const void* source = &value;
  void* destination = &value;
  expect_invalid_argument([&] { kernels::reduce_into(ReduceOp::kAvg, DType::kI32, &value, &value, 1, kCpu); },
                          "AVG is not defined for int32");
  expect_invalid_argument([&] { kernels::reduce_into(ReduceOp::kBxor, DType::kF16, &value, &value, 1, kCpu); },
                          "BXOR is not defined for float16");
  expect_invalid_argument(
      [&] { kernels::reduce_many(ReduceOp::kSum, DType::kBool, &source, 1, &destination, 1, 1, kCpu); },
      "SUM is not defined for bool");
  expect_invalid_argument(
      [&] { kernels::reduce_many(ReduceOp::kSum, DType::kI32, &source, 0, &destination, 1, 1, kCpu); },
      "num_sources is 0");
  expect_invalid_argument([&] { kernels::scale(DType::kI64, &value, 2.0, 1, kCpu); }, "int64");
  expect_invalid_argument([&] { kernels::cast(DType::kI8, &value, DType::kF32, &value, 1, kCpu); }, "int8");
}

#if !defined(BAGUA_WITH_CUDA)
TEST(Dispatch, AnyOtherStreamNeedsABuildWithCuda) {
  const Stream cuda{{DeviceKind::kCuda, 0}};  // the handle of its default stream is null
  uint8_t bytes[64] = {};
  float values[8] = {};
  const void* source = values;
  void* destination = values;
  const std::string message = "built without CUDA";
  expect_invalid_argument([&] { kernels::reduce_into(ReduceOp::kSum, DType::kF32, values, values, 8, cuda); }, message);
  expect_invalid_argument(
      [&] { kernels::reduce_many(ReduceOp::kSum, DType::kF32, &source, 1, &destination, 1, 8, cuda); }, message);
  expect_invalid_argument([&] { kernels::scale(DType::kF32, values, 2.0, 8, cuda); }, message);
  expect_invalid_argument([&] { kernels::cast(DType::kF32, values, DType::kF16, bytes, 8, cuda); }, message);
  expect_invalid_argument([&] { kernels::cast_add(DType::kF16, bytes, values, 8, cuda); }, message);
  expect_invalid_argument([&] { kernels::kMinmaxUint8.encode(0, DType::kF32, values, 8, bytes, {}, nullptr, cuda); },
                          message);
  expect_invalid_argument([&] { kernels::kMinmaxUint8.decode(0, DType::kF32, bytes, 8, values, cuda); }, message);
  expect_invalid_argument([&] { kernels::kMinmaxUint8.decode_add(0, bytes, 8, values, cuda); }, message);
}
#endif

}  // namespace
}  // namespace bagua

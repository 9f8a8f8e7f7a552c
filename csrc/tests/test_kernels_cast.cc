// The float conversions against the definitions of the formats: every 16-bit pattern, random f32 and f64
// bit patterns, values around every rounding boundary, sizes, misalignment; and the codes of fp16 and bf16.
#include "csrc/kernels/cast.h"

#include "csrc/kernels/cpu/half.h"
#include "csrc/kernels/half_codec.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::fill_random;
using testing::half_bits;
using testing::half_value;
using testing::kCpu;
using testing::kFloats;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_real;
using testing::same_bits;
using testing::store_real;

constexpr DType kHalves[] = {DType::kF16, DType::kBF16};

std::vector<uint16_t> all_patterns() {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  return patterns;
}

uint16_t scalar_narrow(DType dtype, float value) {
  return dtype == DType::kF16 ? kernels::f32_to_f16(value) : kernels::f32_to_bf16(value);
}

float scalar_widen(DType dtype, uint16_t bits) {
  return dtype == DType::kF16 ? kernels::f16_to_f32(bits) : kernels::bf16_to_f32(bits);
}

bool is_nan_pattern(DType dtype, uint16_t bits) { return std::isnan(half_value(dtype, bits)); }

TEST(Cast, AllHalfPatternsWidenExactlyAndComeBack) {
  const std::vector<uint16_t> patterns = all_patterns();
  for (DType dtype : kHalves) {
    for (DType wide : {DType::kF32, DType::kF64}) {
      std::vector<double> storage(patterns.size());
      std::vector<uint16_t> back(patterns.size());
      kernels::cast(dtype, patterns.data(), wide, storage.data(), patterns.size(), kCpu);
      kernels::cast(wide, storage.data(), dtype, back.data(), back.size(), kCpu);
      for (size_t i = 0; i < patterns.size(); ++i) {
        const double value = load_real(wide, storage.data(), i);
        const uint16_t quiet = dtype == DType::kF16 ? 0x0200 : 0x0040;
        if (is_nan_pattern(dtype, patterns[i])) {
          ASSERT_TRUE(std::isnan(value)) << i;
          ASSERT_EQ(back[i], patterns[i] | quiet) << i;
        } else {
          ASSERT_EQ(std::bit_cast<uint64_t>(value), std::bit_cast<uint64_t>(half_value(dtype, patterns[i]))) << i;
          ASSERT_EQ(back[i], patterns[i]) << i;
        }
      }
    }
  }
}

// The array forms may be other instructions than the scalar definition: NaN payloads included, same bits.
TEST(Cast, ArraysEqualTheScalarDefinition) {
  std::mt19937 random(7);
  for (DType dtype : kHalves) {
    const std::vector<uint16_t> patterns = all_patterns();
    std::vector<float> widened(patterns.size());
    kernels::cast(dtype, patterns.data(), DType::kF32, widened.data(), widened.size(), kCpu);
    for (size_t i = 0; i < patterns.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(widened[i]), std::bit_cast<uint32_t>(scalar_widen(dtype, patterns[i]))) << i;
    }
    std::vector<float> values(size_t{1} << 21);
    for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    std::vector<uint16_t> narrowed(values.size());
    kernels::cast(DType::kF32, values.data(), dtype, narrowed.data(), values.size(), kCpu);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(narrowed[i], scalar_narrow(dtype, values[i])) << std::hexfloat << values[i];
      const uint16_t expected = half_bits(dtype, values[i]);
      if (std::isnan(values[i])) {
        ASSERT_TRUE(is_nan_pattern(dtype, narrowed[i]));
      } else {
        ASSERT_EQ(narrowed[i], expected) << std::hexfloat << values[i];
      }
    }
  }
}

// Every midpoint between neighbours, and the nearest numbers of the source type on both sides of it.
template <typename T>
void check_boundaries(DType from, DType to) {
  std::vector<T> values;
  for (uint32_t bits = 0; bits + 1 < 0x7fffu; ++bits) {
    const double below = half_value(to, static_cast<uint16_t>(bits));
    double above = half_value(to, static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(below) || std::isnan(above)) break;
    if (std::isinf(above)) above = 2 * below - half_value(to, static_cast<uint16_t>(bits - 1));
    const T middle = static_cast<T>((below + above) / 2);
    for (T value : {middle, std::nextafter(middle, T{0}), std::nextafter(middle, std::numeric_limits<T>::max())}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::vector<uint16_t> narrowed(values.size());
  kernels::cast(from, values.data(), to, narrowed.data(), values.size(), kCpu);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(narrowed[i], half_bits(to, static_cast<double>(values[i]))) << std::hexfloat << values[i];
  }
}

TEST(Cast, RoundsToNearestEvenAtEveryBoundary) {
  for (DType to : kHalves) {
    check_boundaries<float>(DType::kF32, to);
    check_boundaries<double>(DType::kF64, to);  // nextafter in f64 is lost if the way leads through f32
  }
}

TEST(Cast, RandomF64Patterns) {
  std::mt19937_64 random(8);
  std::vector<double> values(size_t{1} << 18);
  for (double& value : values) {
    const uint64_t bits = random();
    // Half of them in the range of the small formats, where a uniform exponent hardly ever falls.
    const uint64_t near_one = (bits & ~(uint64_t{0x7ff} << 52)) | (uint64_t{1023 - 40} + bits % 64) << 52;
    value = std::bit_cast<double>(bits & 1 ? bits : near_one);
  }
  for (DType to : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<float> storage(values.size());
    kernels::cast(DType::kF64, values.data(), to, storage.data(), values.size(), kCpu);
    for (size_t i = 0; i < values.size(); ++i) {
      double expected = 0;  // room for any type
      store_real(to, &expected, 0, values[i]);
      const double got = load_real(to, storage.data(), i), want = load_real(to, &expected, 0);
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(got));
      } else {
        ASSERT_EQ(std::bit_cast<uint64_t>(got), std::bit_cast<uint64_t>(want)) << values[i];
      }
    }
  }
}

void check_pair(DType from, DType to, size_t numel, size_t skew_bytes) {
  SCOPED_TRACE(std::string(dtype_name(from)) + " to " + std::string(dtype_name(to)) + ", " + std::to_string(numel));
  const auto skew = [&](DType dtype) { return item_bytes(dtype) == 2 ? skew_bytes : skew_bytes * item_bytes(dtype); };
  Array source(numel * item_bytes(from), skew(from)), out(numel * item_bytes(to), skew(to));
  Array expected(numel * item_bytes(to), 0);
  fill_random(from, source.data(), numel, 9);
  for (size_t i = 0; i < numel; ++i) store_real(to, expected.data(), i, load_real(from, source.data(), i));
  kernels::cast(from, source.data(), to, out.data(), numel, kCpu);
  EXPECT_TRUE(same_bits(out.data(), expected.data(), out.size_bytes()));
  out.expect_canary();
}

TEST(Cast, EveryPairSizeAndAlignment) {
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      for (size_t numel : kSmallSizes) {
        for (size_t skew : {0, 1, 3}) check_pair(from, to, numel, skew);
      }
    }
  }
  check_pair(DType::kF32, DType::kF16, kLargeSize, 1);
  check_pair(DType::kBF16, DType::kF32, kLargeSize, 1);
}

TEST(CastAdd, EqualsTheOracle) {
  for (DType from : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (size_t numel : kSmallSizes) {
      for (size_t skew : {0, 1, 3}) {
        Array source(numel * item_bytes(from), from == DType::kF32 ? 4 * skew : skew), acc(numel * 4, 4 * skew);
        fill_random(from, source.data(), numel, 10);
        fill_random(DType::kF32, acc.data(), numel, 11);
        std::vector<float> expected(numel);
        for (size_t i = 0; i < numel; ++i) {
          expected[i] = static_cast<float>(load_real(from, source.data(), i) + load_real(DType::kF32, acc.data(), i));
        }
        kernels::cast_add(from, source.data(), acc.as<float>(), numel, kCpu);
        EXPECT_TRUE(same_bits(acc.data(), expected.data(), acc.size_bytes()));
        acc.expect_canary();
      }
    }
  }
}

// A cast, but for a NaN, which has one pattern.
uint16_t code_oracle(DType to, double value) {
  if (std::isnan(value)) return to == DType::kF16 ? 0x7e00 : 0x7fc0;
  return half_bits(to, value);
}

// Returns the codes, and adds those that are not finite to `num_nonfinite`.
std::vector<uint16_t> encoded(DType from, const void* source, size_t numel, DType to, uint64_t* num_nonfinite) {
  Array bytes(numel * 2, 1);
  kernels::kHalf.encode(static_cast<int>(to), from, source, numel, bytes.data(), {}, num_nonfinite, kCpu);
  bytes.expect_canary();
  std::vector<uint16_t> codes(numel);
  if (numel > 0) std::memcpy(codes.data(), bytes.data(), 2 * numel);
  return codes;
}

TEST(HalfCodec, RandomF32Patterns) {
  std::mt19937 random(12);
  for (DType to : kHalves) {
    Array source(kLargeSize * 4, 4);
    for (size_t i = 0; i < kLargeSize; ++i) source.as<uint32_t>()[i] = static_cast<uint32_t>(random());
    uint64_t num_nonfinite = 5, expected_nonfinite = 5;  // the count is added to what is there
    const auto codes = encoded(DType::kF32, source.data(), kLargeSize, to, &num_nonfinite);
    for (size_t i = 0; i < kLargeSize; ++i) {
      ASSERT_EQ(codes[i], code_oracle(to, load_real(DType::kF32, source.data(), i)));
      expected_nonfinite += !std::isfinite(half_value(to, codes[i]));
    }
    EXPECT_EQ(num_nonfinite, expected_nonfinite);
  }
}

TEST(HalfCodec, WhatOverflowsBecomesInfAndIsCounted) {
  for (DType to : kHalves) {
    const double largest = testing::half_format(to).largest;
    const float first = to == DType::kF16 ? 65520.0f : 0x1.ffp127f;  // halfway to the next power of two
    const float values[] = {static_cast<float>(largest), std::nextafter(first, 0.0f), first, -first, 3e38f, HUGE_VALF};
    uint64_t num_nonfinite = 0;
    const auto codes = encoded(DType::kF32, values, std::size(values), to, &num_nonfinite);
    EXPECT_EQ(num_nonfinite, to == DType::kF16 ? 4u : 3u);
    EXPECT_EQ(half_value(to, codes[0]), largest);
    EXPECT_EQ(half_value(to, codes[1]), largest);
    EXPECT_EQ(half_value(to, codes[2]), HUGE_VAL);
    EXPECT_EQ(half_value(to, codes[3]), -HUGE_VAL);
    EXPECT_EQ(std::isinf(half_value(to, codes[4])), to == DType::kF16);
    EXPECT_EQ(half_value(to, codes[5]), HUGE_VAL);
  }
}

TEST(HalfCodec, AllHalfPatterns) {
  const std::vector<uint16_t> patterns = all_patterns();
  for (DType from : kHalves) {
    for (DType to : kHalves) {
      const auto codes = encoded(from, patterns.data(), patterns.size(), to, nullptr);
      for (size_t i = 0; i < patterns.size(); ++i) {
        ASSERT_EQ(codes[i], code_oracle(to, half_value(from, patterns[i]))) << i;
      }
    }
  }
}

TEST(HalfCodec, EverySize) {
  for (DType from : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (size_t numel : kSmallSizes) {
      Array source(numel * item_bytes(from), 0);
      fill_random(from, source.data(), numel, 13);
      const auto codes = encoded(from, source.data(), numel, DType::kF16, nullptr);
      for (size_t i = 0; i < numel; ++i) {
        ASSERT_EQ(codes[i], code_oracle(DType::kF16, load_real(from, source.data(), i)));
      }
    }
  }
}

}  // namespace
}  // namespace bagua

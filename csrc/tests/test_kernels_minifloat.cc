// The small floats: bit for bit against the formula of their header written as a loop over elements that searches the
// table of numbers, for every type and in a mode that flushes subnormal numbers.
#include "csrc/kernels/minifloat.h"

#include <algorithm>
#include <cmath>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kBlockNumel;
using kernels::Minifloat;
using kernels::minifloat_wire_bytes;
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

constexpr Minifloat kMinifloats[] = {Minifloat::kE4M3, Minifloat::kE5M2, Minifloat::kE2M1, Minifloat::kE3M0};
static_assert(std::size(kMinifloats) == kernels::kNumMinifloats);

// The header's magnitudes, by code, up to the largest.
std::vector<double> minifloats_of(Minifloat type) {
  std::vector<double> numbers;
  if (type == Minifloat::kE4M3) {
    for (int c = 0; c <= 126; ++c) numbers.push_back(c < 8 ? c * 0x1p-9 : std::ldexp(8 + c % 8, c / 8 - 10));
  } else if (type == Minifloat::kE5M2) {
    for (int c = 0; c <= 123; ++c) numbers.push_back(c < 4 ? c * 0x1p-16 : std::ldexp(4 + c % 4, c / 4 - 17));
  } else if (type == Minifloat::kE2M1) {
    numbers = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  } else {
    numbers = {0, 0.25, 0.5, 1, 2, 4, 8, 16};
  }
  return numbers;
}

// The code of the number nearest to a magnitude; of two equally near ones the even code.
size_t nearest(const std::vector<double>& numbers, double magnitude) {
  size_t code = 0;
  for (size_t c = 1; c < numbers.size(); ++c) {
    const double better = std::fabs(numbers[code] - magnitude) - std::fabs(numbers[c] - magnitude);
    if (better > 0 || (better == 0 && c % 2 == 0)) code = c;
  }
  return code;
}

struct MinifloatOracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite_blocks = 0;
};

MinifloatOracle minifloat_oracle(Minifloat type, const std::vector<float>& values) {
  MinifloatOracle result;
  const std::vector<double> numbers = minifloats_of(type);
  const double most = numbers.back();
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const size_t count = std::min(kBlockNumel, values.size() - begin);
    float norm = 0;
    bool finite = true;
    for (size_t i = begin; i < begin + count; ++i) {
      finite = finite && std::isfinite(values[i]);
      norm = std::max(norm, std::fabs(values[i]));
    }
    if (!finite) norm = std::bit_cast<float>(0x7fc00000u);
    result.num_nonfinite_blocks += !finite;
    const float s = norm < 0x1p-80f ? 0x1p100f : 1.0f;
    const double product = static_cast<double>(norm) * static_cast<double>(s);
    const float units = norm == 0 ? 0 : static_cast<float>(most / product), step = static_cast<float>(product / most);
    for (int byte = 0; byte < 4; ++byte) {
      result.bytes.push_back(static_cast<uint8_t>(std::bit_cast<uint32_t>(norm) >> 8 * byte));
    }
    const bool is_byte = type == Minifloat::kE4M3 || type == Minifloat::kE5M2;
    const size_t n = is_byte ? count : (count + 1) / 2 * 2;
    std::vector<size_t> codes(n, 0);
    for (size_t i = 0; i < count; ++i) {
      if (!finite) {
        result.decoded.push_back(norm);
        continue;
      }
      const float x = values[begin + i];
      const size_t code = nearest(numbers, std::fabs(static_cast<double>(x * s * units)));
      codes[i] = code + (std::signbit(x) ? (is_byte ? 128 : 8) : 0);
      const float value = numbers[code] == most ? norm : static_cast<float>(numbers[code]) * step / s;
      result.decoded.push_back(std::signbit(x) ? -value : value);
    }
    for (size_t j = 0; j < (is_byte ? n : n / 2); ++j) {
      result.bytes.push_back(static_cast<uint8_t>(is_byte ? codes[j] : codes[j] | codes[j + n / 2] << 4));
    }
  }
  return result;
}

struct MinifloatCase {
  Minifloat type;
  DType dtype = DType::kF32;
  size_t skew = 0;       // of the bytes and of halves, in bytes; of f32 in elements
  bool flushes = false;  // run in a mode that takes subnormal numbers for zeros
};

// All three kernels.
void expect_formula(const MinifloatCase& one, const std::vector<float>& values) {
  const int type = static_cast<int>(one.type);
  SCOPED_TRACE("type " + std::to_string(type) + ", " + std::string(dtype_name(one.dtype)) + " x " +
               std::to_string(values.size()) + (one.flushes ? ", flushing" : ""));
  const MinifloatOracle expected = minifloat_oracle(one.type, values);
  const size_t numel = values.size(), item = item_bytes(one.dtype);
  const size_t value_skew = one.dtype == DType::kF32 ? 4 * one.skew : one.skew;
  ASSERT_EQ(expected.bytes.size(), minifloat_wire_bytes(numel, type));
  Array source(numel * item, value_skew), bytes(expected.bytes.size(), one.skew);
  Array decoded(numel * item, value_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(one.dtype, source.data(), i, values[i]);
  fill_random(DType::kF32, sums.data(), numel, 40);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  uint64_t num_nonfinite_blocks = 5;
  {
    const auto mode = one.flushes ? std::make_unique<FlushToZero>() : nullptr;
    kernels::kMinifloat.encode(type, one.dtype, source.data(), numel, bytes.data(), {}, &num_nonfinite_blocks, kCpu);
    kernels::kMinifloat.decode(type, one.dtype, bytes.data(), numel, decoded.data(), kCpu);
    kernels::kMinifloat.decode_add(type, bytes.data(), numel, sums.as<float>(), kCpu);
  }
  EXPECT_EQ(num_nonfinite_blocks, 5 + expected.num_nonfinite_blocks);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  expect_floats(one.dtype, decoded, expected.decoded);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(Minifloat, IsTheFormula) {
  for (Minifloat type : kMinifloats) {
    for (DType dtype : kEncodable) {
      for (size_t skew : {0, 1, 3}) {
        for (size_t numel : kSmallSizes) expect_formula({type, dtype, skew}, random_values(dtype, numel, numel));
        expect_formula({type, dtype, skew}, random_values(dtype, 3 * kBlockNumel + 77, 41));
      }
      expect_formula({type, dtype, 1}, random_values(dtype, kLargeSize, 42));
    }
  }
}

// Numbers, the middles between them and their neighbours, each as it is and negative, below a norm of M.
TEST(Minifloat, TiesGoToTheEvenCode) {
  for (Minifloat type : kMinifloats) {
    const std::vector<double> numbers = minifloats_of(type);
    std::vector<float> values;
    for (size_t c = 0; c + 1 < numbers.size(); ++c) {
      const float middle = static_cast<float>((numbers[c] + numbers[c + 1]) / 2);
      for (float value :
           {static_cast<float>(numbers[c]), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, HUGE_VALF)}) {
        values.insert(values.end(), {value, -value});
      }
    }
    ASSERT_LT(values.size(), kBlockNumel);
    values.push_back(static_cast<float>(numbers.back()));
    expect_formula({type}, values);
  }
}

// Around the norms that a power of two scales, the smallest normal and the smallest number.
TEST(Minifloat, EveryMagnitude) {
  for (Minifloat type : kMinifloats) {
    for (int exponent = -149; exponent < 120; ++exponent) {
      const std::vector<float> values = random_values(DType::kF32, 577, 5);
      expect_formula({type}, scaled(values, std::ldexp(1.0f, exponent)));
    }
  }
}

TEST(Minifloat, RandomBitPatterns) {
  for (Minifloat type : kMinifloats) {
    for (DType dtype : kEncodable) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        expect_formula({type, dtype, 1}, random_finite_bits(dtype, 3000, seed));
      }
    }
  }
}

// The kernels do not saturate: the contract's formula has to lead to M by itself. A power of two changes nothing, so
// all mantissas are all norms.
TEST(Minifloat, ANormRoundsToTheLargest) {
  for (Minifloat type : kMinifloats) {
    const std::vector<double> numbers = minifloats_of(type);
    const double most = numbers.back(), margin = (most - numbers[numbers.size() - 2]) / 2;
    size_t num_wrong = 0;
    for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
      const float norm = std::bit_cast<float>(0x3f800000u | mantissa);
      const float product = norm * static_cast<float>(most / static_cast<double>(norm));
      num_wrong += std::fabs(static_cast<double>(product) - most) >= margin;
    }
    EXPECT_EQ(num_wrong, 0u);
  }
}

TEST(Minifloat, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (Minifloat type : kMinifloats) {
    for (size_t numel : {size_t{1}, size_t{5}, kBlockNumel, kBlockNumel + 1}) {
      for (float value : {0.0f, -0.0f, 1.0f, -1.0f / 3, huge, -huge, tiny, -tiny, nan, HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        expect_formula({type, DType::kF32, 1}, values);
        for (size_t i = 0; i < numel; i += 2) values[i] = -value;
        expect_formula({type, DType::kF32, 1}, values);
        values[numel / 2] = 1;
        expect_formula({type}, values);
        values.back() = -tiny;
        expect_formula({type}, values);
      }
    }
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const float largest = static_cast<float>(testing::half_format(dtype).largest);
      for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
        std::vector<float> values(kBlockNumel + 9, value);
        expect_formula({type, dtype, 1}, values);
        values[1000] = 1;
        expect_formula({type, dtype, 1}, values);
      }
    }
  }
}

// The oracle itself runs in the usual mode.
TEST(Minifloat, FlushToZeroChangesNothing) {
  if (!FlushToZero::kIsPossible) GTEST_SKIP() << "this processor has no such mode that the test knows";
  for (Minifloat type : kMinifloats) {
    for (DType dtype : kEncodable) {
      for (size_t numel : {size_t{1}, size_t{33}, 2 * kBlockNumel + 77}) {
        for (float factor : {1.0f, 1e-22f, 1e-24f, 1e-27f, 1e-30f, 1e-36f, 1e-38f, 1e-40f, 1e-43f, 1e-45f}) {
          std::vector<float> values = scaled(random_values(DType::kF32, numel, 44), factor);
          for (float& value : values) {
            uint8_t narrow[8];
            store_real(dtype, narrow, 0, value);
            value = static_cast<float>(testing::load_real(dtype, narrow, 0));
          }
          expect_formula({type, dtype, 1, /*flushes=*/true}, values);
        }
      }
      expect_formula({type, dtype, 1, /*flushes=*/true}, random_finite_bits(dtype, 3000, 45));
    }
  }
}

TEST(Minifloat, RejectsOtherTypes) {
  float x = 1;
  uint8_t bytes[64];
  testing::expect_invalid_argument(
      [&] { kernels::kMinifloat.encode(kernels::kNumMinifloats, DType::kF32, &x, 1, bytes, {}, nullptr, kCpu); },
      "type is 4, expected 0 to 3");
}

}  // namespace
}  // namespace bagua

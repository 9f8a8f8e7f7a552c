// The min-max quantiser: bit for bit against the formula of its header written as a scalar loop, codes and
// error against f64 arithmetic on real numbers, and the blocks that broke others: zeros beside other values,
// constant, tiny, subnormal, huge, NaN, Inf, -0.0.
#include "csrc/kernels/minmax_uint8.h"

#include <algorithm>

#include "csrc/kernels/cast.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kBlockNumel;
using kernels::minmax_uint8_wire_bytes;
using testing::Array;
using testing::fill_random;
using testing::kCpu;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_real;
using testing::random_values;
using testing::same_bits;
using testing::store_real;

constexpr size_t kHeaderBytes = kernels::kMinmaxUint8HeaderBytes;

struct Bounds {
  float min, max;
};

float scale_of(double range) { return range > 0 && range < 0x1p-100 ? 0x1p100f : range >= 0x1p126 ? 0x1p-4f : 1.0f; }

struct Grid {
  float s, step, inverse_step, base, z;
};

Grid grid_of(const Bounds& bounds) {
  const double range = static_cast<double>(bounds.max) - static_cast<double>(bounds.min);
  const float s = scale_of(range);
  const double scaled_range = range * static_cast<double>(s);
  Grid grid{s, static_cast<float>(scaled_range / 255), static_cast<float>(255 / scaled_range), bounds.min * s, 0};
  if (bounds.min <= 0 && bounds.max >= 0) {
    grid.z = std::nearbyint(-(grid.base * grid.inverse_step));
    grid.base = 0;
  }
  return grid;
}

bool less_with_signed_zero(float a, float b) { return a < b || (a == b && std::signbit(a) && !std::signbit(b)); }

// One block by the formula of the header; appends to `bytes`.
void encode_block(const float* values, size_t numel, std::vector<uint8_t>& bytes) {
  const bool finite = std::all_of(values, values + numel, [](float value) { return std::isfinite(value); });
  Bounds bounds{std::bit_cast<float>(0x7fc00000u), std::bit_cast<float>(0x7fc00000u)};
  if (finite) {
    bounds = {*std::min_element(values, values + numel, less_with_signed_zero),
              *std::max_element(values, values + numel, less_with_signed_zero)};
  }
  bytes.resize(bytes.size() + kHeaderBytes);
  std::memcpy(bytes.data() + bytes.size() - kHeaderBytes, &bounds, kHeaderBytes);
  const Grid grid = grid_of(bounds);
  for (size_t i = 0; i < numel; ++i) {
    if (!finite || bounds.min == bounds.max) {
      bytes.push_back(0);
      continue;
    }
    const float steps = (values[i] * grid.s - grid.base) * grid.inverse_step;
    const double code = std::nearbyint(static_cast<double>(steps) + static_cast<double>(grid.z));
    EXPECT_GE(code, 0);
    bytes.push_back(static_cast<uint8_t>(std::min(255.0, code)));
  }
}

std::vector<uint8_t> encode_oracle(const std::vector<float>& values) {
  std::vector<uint8_t> bytes;
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    encode_block(values.data() + begin, std::min(kBlockNumel, values.size() - begin), bytes);
  }
  return bytes;
}

std::vector<float> decode_oracle(const std::vector<uint8_t>& bytes, size_t numel) {
  std::vector<float> values;
  for (size_t i = 0; i < numel; ++i) {
    const size_t block = i / kBlockNumel;
    const uint8_t* header = bytes.data() + block * (kBlockNumel + kHeaderBytes);
    Bounds bounds;
    std::memcpy(&bounds, header, kHeaderBytes);
    const uint8_t code = header[kHeaderBytes + i % kBlockNumel];
    const Grid grid = grid_of(bounds);
    const float value = (grid.base - grid.z * grid.step + static_cast<float>(code) * grid.step) / grid.s;
    values.push_back(bounds.min == bounds.max ? bounds.min
                     : value < bounds.min     ? bounds.min
                     : value > bounds.max     ? bounds.max
                                              : value);
  }
  return values;
}

// Encodes and decodes at the given misalignments; checks bytes and values against the scalar formula.
std::vector<float> check_round_trip(const std::vector<float>& values, size_t byte_skew = 0, size_t float_skew = 0,
                                    uint64_t expected_nonfinite_blocks = 0) {
  const size_t numel = values.size(), num_bytes = minmax_uint8_wire_bytes(numel);
  Array source(numel * 4, 4 * float_skew), wire(num_bytes, byte_skew), decoded(numel * 4, 4 * float_skew);
  if (numel > 0) std::memcpy(source.data(), values.data(), numel * 4);
  uint64_t num_nonfinite_blocks = 0;
  kernels::kMinmaxUint8.encode(0, DType::kF32, source.data(), numel, wire.data(), {}, &num_nonfinite_blocks, kCpu);
  EXPECT_EQ(num_nonfinite_blocks, expected_nonfinite_blocks);
  const std::vector<uint8_t> expected = encode_oracle(values);
  EXPECT_EQ(expected.size(), num_bytes);
  EXPECT_TRUE(same_bits(wire.data(), expected.data(), num_bytes));
  wire.expect_canary();

  kernels::kMinmaxUint8.decode(0, DType::kF32, wire.data(), numel, decoded.data(), kCpu);
  decoded.expect_canary();
  const std::vector<float> expected_values = decode_oracle(expected, numel);
  std::vector<float> result(decoded.as<float>(), decoded.as<float>() + numel);
  EXPECT_TRUE(same_bits(result.data(), expected_values.data(), numel * 4));

  Array accumulator(numel * 4, 4 * float_skew);
  fill_random(DType::kF32, accumulator.data(), numel, 20);
  std::vector<float> expected_sum(accumulator.as<float>(), accumulator.as<float>() + numel);
  for (size_t i = 0; i < numel; ++i) expected_sum[i] += expected_values[i];
  kernels::kMinmaxUint8.decode_add(0, wire.data(), numel, accumulator.as<float>(), kCpu);
  EXPECT_TRUE(same_bits(accumulator.data(), expected_sum.data(), numel * 4));
  accumulator.expect_canary();
  return result;
}

// Per block: |x - decoded| <= (max - min) / 510, plus rounding: of the position (255 * 2^-22 of a step) and of the
// decoded value (its last place); nothing decodes to what lies beyond min and max; zeros are exact.
void expect_bound(const std::vector<float>& values, const std::vector<float>& decoded) {
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const size_t end = std::min(values.size(), begin + kBlockNumel);
    const auto [low, high] = std::minmax_element(values.begin() + static_cast<ptrdiff_t>(begin),
                                                 values.begin() + static_cast<ptrdiff_t>(end));
    const double range = static_cast<double>(*high) - static_cast<double>(*low);
    const double largest = std::max(std::fabs(static_cast<double>(*low)), std::fabs(static_cast<double>(*high)));
    const double bound = range / 510 * (1 + 1e-4) + std::max(largest * 0x1p-23, 0x1p-149);
    for (size_t i = begin; i < end; ++i) {
      const double error = std::fabs(static_cast<double>(values[i]) - static_cast<double>(decoded[i]));
      ASSERT_LE(error, values[i] == 0 ? 0 : bound) << i << " " << values[i] << " " << decoded[i];
      ASSERT_TRUE(*low <= decoded[i] && decoded[i] <= *high) << i << " " << values[i] << " " << decoded[i];
    }
  }
}

TEST(MinmaxUint8, EverySizeAndAlignment) {
  for (size_t numel : kSmallSizes) {
    for (size_t byte_skew : {0, 1, 2, 3, 7}) {
      for (size_t float_skew : {0, 1, 3}) {
        const std::vector<float> values = random_values(DType::kF32, numel, numel);
        expect_bound(values, check_round_trip(values, byte_skew, float_skew));
      }
    }
  }
  const std::vector<float> values = random_values(DType::kF32, kLargeSize, 21);
  expect_bound(values, check_round_trip(values, 1, 1));
}

// The code is the nearest even integer of the real position on the grid that has 0 at an integer; f32 arithmetic may
// decide otherwise only within its rounding error of a tie. A block that is wholly positive has its grid from min.
TEST(MinmaxUint8, CodesEqualRealArithmetic) {
  std::vector<float> values = random_values(DType::kF32, 100 * kBlockNumel, 22);
  for (size_t i = values.size() / 2; i < values.size(); ++i) values[i] = std::fabs(values[i]) + 1.0f;
  const std::vector<uint8_t> bytes = encode_oracle(values);
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const float* block = values.data() + begin;
    const size_t header_bytes = (begin / kBlockNumel + 1) * kHeaderBytes;  // up to and with this block's
    const uint8_t* codes = bytes.data() + begin + header_bytes;
    const double low = *std::min_element(block, block + kBlockNumel);
    const double high = *std::max_element(block, block + kBlockNumel);
    const double exact_zero = -low / (high - low) * 255;
    const double moved = low <= 0 && high >= 0 ? std::nearbyint(exact_zero) - exact_zero : 0;
    ASSERT_LE(std::fabs(moved), 0.5);
    for (size_t i = 0; i < kBlockNumel; ++i) {
      const double position = (block[i] - low) / (high - low) * 255 + moved;
      ASSERT_LE(std::fabs(std::min(255.0, position) - codes[i]), 0.5 + 1e-4);
    }
  }
}

// Wherever 0 lies between min and max, at every magnitude: it decodes to 0, and so it is after a sum of what several
// ranks sent is encoded again. Its position between two steps goes through all of them, ties included.
TEST(MinmaxUint8, ZerosAreExactWhereverTheyLie) {
  for (int exponent : {-149, -140, -126, -110, -99, -60, 0, 60, 110, 118, 119}) {
    for (int sixteenth = 0; sixteenth <= 255 * 16; ++sixteenth) {
      const auto at = [&](double steps) { return static_cast<float>(std::ldexp(steps, exponent)); };
      const double low = -sixteenth / 16.0, high = 255 + low;
      const std::vector<float> values = {0.0f, at(low), -0.0f, at(high), 0.0f, at(low / 2), at(high / 3), at(0.25)};
      std::vector<uint8_t> bytes(minmax_uint8_wire_bytes(values.size()));
      kernels::kMinmaxUint8.encode(0, DType::kF32, values.data(), values.size(), bytes.data(), {}, nullptr, kCpu);
      ASSERT_EQ(bytes, encode_oracle(values));
      std::vector<float> decoded(values.size());
      kernels::kMinmaxUint8.decode(0, DType::kF32, bytes.data(), values.size(), decoded.data(), kCpu);
      expect_bound(values, decoded);
      kernels::kMinmaxUint8.decode_add(0, bytes.data(), values.size(), decoded.data(), kCpu);
      ASSERT_TRUE(decoded[0] == 0.0f && decoded[2] == 0.0f && decoded[4] == 0.0f) << low << " * 2^" << exponent;
    }
  }
}

// Codes 0..255 of exact steps come back as themselves: all 256 levels are used, none wraps.
TEST(MinmaxUint8, UsesAllLevelsAtEveryMagnitude) {
  for (int exponent = -149; exponent <= 119; ++exponent) {
    std::vector<float> values(256);
    for (int i = 0; i < 256; ++i) values[static_cast<size_t>(i)] = std::ldexp(static_cast<float>(i), exponent);
    EXPECT_EQ(check_round_trip(values), values) << exponent;
    std::vector<uint8_t> bytes(minmax_uint8_wire_bytes(256));
    kernels::kMinmaxUint8.encode(0, DType::kF32, values.data(), 256, bytes.data(), {}, nullptr, kCpu);
    for (size_t i = 0; i < 256; ++i) ASSERT_EQ(bytes[kHeaderBytes + i], i);
  }
}

TEST(MinmaxUint8, ConstantBlocksAreExact) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (float value : {0.0f, -0.0f, 1.0f, -3.3f, 1e-30f, 0x1p-149f, -0x1p-149f, 0x1p-126f, kMax, -kMax}) {
    const std::vector<float> values(2500, value);
    EXPECT_TRUE(same_bits(check_round_trip(values).data(), values.data(), 4 * values.size())) << value;
  }
}

TEST(MinmaxUint8, TinySubnormalAndHugeRanges) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const Bounds cases[] = {{0.0f, 1e-30f},    {-1e-30f, 1e-30f},       {1.0f, 1.0000001f},   {1.0f, 1.0000005f},
                          {0.0f, 0x1p-149f}, {-0x1p-149f, 0.0f},      {0.0f, 0x1p-140f},    {0x1p-126f, 0x1.1p-126f},
                          {-3e38f, 3e38f},   {-kMax, kMax},           {0.0f, kMax},         {-kMax, 0.0f},
                          {kMax / 2, kMax},  {0x1p-101f, 0x1p-100f},  {0.0f, 0x1p-100f},    {0.0f, 0x1.fffffep-101f},
                          {0.0f, 0x1p126f},  {0.0f, 0x1.fffffep125f}, {1e30f, 1.00001e30f}, {-1e-44f, 1e38f},
                          {-255.0f, -0.0f}};
  std::mt19937 random(23);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (const Bounds& bounds : cases) {
    SCOPED_TRACE(std::to_string(bounds.min) + " " + std::to_string(bounds.max));
    std::vector<float> values(2048 + 77);
    for (float& value : values) {
      const double t = uniform(random);
      value = static_cast<float>(bounds.min * (1 - t) + bounds.max * t);
    }
    values[5] = values[2050] = bounds.min;
    values[9] = values[2060] = bounds.max;
    expect_bound(values, check_round_trip(values, 1, 1));
  }
}

// Random bit patterns, a finite block each: magnitudes from 1e-45 to 3e38 beside each other.
TEST(MinmaxUint8, RandomBitPatterns) {
  std::mt19937 random(24);
  for (int round = 0; round < 50; ++round) {
    std::vector<float> values(1 + random() % 3000);
    const uint32_t mask = round % 2 ? 0xffffffffu : 0x80ffffffu;  // half of the rounds are all subnormal or close
    for (float& value : values) {
      do value = std::bit_cast<float>(static_cast<uint32_t>(random()) & mask);
      while (!std::isfinite(value));
    }
    expect_bound(values, check_round_trip(values, static_cast<size_t>(round) % 5, 0));
  }
}

TEST(MinmaxUint8, NanAndInfMarkTheirBlockOnly) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float specials[] = {std::nanf(""), -std::nanf(""), std::bit_cast<float>(0x7f800001u), kInf, -kInf};
  for (float special : specials) {
    for (size_t at : {0, 1, 2047, 2048, 4095, 4096, 4999}) {
      std::vector<float> values = random_values(DType::kF32, 5000, 25);
      const std::vector<float> clean = values;
      values[at] = special;
      const size_t numel = values.size();
      std::vector<uint8_t> bytes(minmax_uint8_wire_bytes(numel));
      uint64_t num_nonfinite_blocks = 0;
      kernels::kMinmaxUint8.encode(0, DType::kF32, values.data(), numel, bytes.data(), {}, &num_nonfinite_blocks, kCpu);
      EXPECT_EQ(num_nonfinite_blocks, 1u);
      EXPECT_EQ(bytes, encode_oracle(values));
      std::vector<float> decoded(numel), sum(numel, 1.0f);
      kernels::kMinmaxUint8.decode(0, DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
      kernels::kMinmaxUint8.decode_add(0, bytes.data(), numel, sum.data(), kCpu);
      const std::vector<float> expected = decode_oracle(encode_oracle(clean), numel);
      for (size_t i = 0; i < numel; ++i) {
        const bool marked = i / kBlockNumel == at / kBlockNumel;
        ASSERT_EQ(std::isnan(decoded[i]), marked);
        ASSERT_EQ(std::isnan(sum[i]), marked);
        ASSERT_TRUE(marked || decoded[i] == expected[i]);
      }
    }
  }
}

TEST(MinmaxUint8, HalvesAreTheirF32ValuesAndRoundOnce) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (size_t numel : kSmallSizes) {
      Array source(numel * 2, 1), decoded(numel * 2, 3);
      fill_random(dtype, source.data(), numel, 26);
      std::vector<float> wide(numel);
      kernels::cast(dtype, source.data(), DType::kF32, wide.data(), numel, kCpu);
      const std::vector<uint8_t> expected = encode_oracle(wide);
      std::vector<uint8_t> bytes(expected.size());
      kernels::kMinmaxUint8.encode(0, dtype, source.data(), numel, bytes.data(), {}, nullptr, kCpu);
      EXPECT_EQ(bytes, expected);
      const std::vector<float> values = decode_oracle(expected, numel);
      std::vector<uint16_t> expected_halves(numel);
      for (size_t i = 0; i < numel; ++i) store_real(dtype, expected_halves.data(), i, values[i]);
      kernels::kMinmaxUint8.decode(0, dtype, bytes.data(), numel, decoded.data(), kCpu);
      EXPECT_TRUE(same_bits(decoded.data(), expected_halves.data(), numel * 2));
      decoded.expect_canary();
    }
  }
}

}  // namespace
}  // namespace bagua

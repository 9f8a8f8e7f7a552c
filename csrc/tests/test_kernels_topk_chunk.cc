// The sparsifier in chunks: bit for bit against its header's definition in plain loops after a stable sort, for every
// type, k and width of values, on the chunks that are hard for a threshold; the squared error of 2-bit values; and that
// no message, however damaged, writes outside.
#include "csrc/kernels/topk_chunk.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::TopkChunk;
using testing::Array;
using testing::expect_floats;
using testing::expect_invalid_argument;
using testing::fill_random;
using testing::kCpu;
using testing::kEncodable;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::random_finite_bits;
using testing::random_values;
using testing::same_bits;
using testing::store_real;

constexpr size_t kChunk = 4096;
constexpr size_t kSizesOfChunks[] = {7, 8, 9, 255, 256, 257, 4095, 4096, 4097, 2 * 4096 + 77};

std::vector<TopkChunk> all_topk_chunks() {
  std::vector<TopkChunk> all;
  for (int k : {8, 16, 32, 64, 128, 256}) {
    for (bool has_2_bits : {false, true}) all.push_back({k, has_2_bits});
  }
  all.push_back({32, false, true});
  all.push_back({64, true, true});
  return all;
}

struct ChunkOracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite = 0;

  // The number in `num_bits` bits, behind what the message holds.
  void add_bits(uint32_t number, int num_bits) {
    for (int bit = 0; bit < num_bits; ++bit, ++num_stored) {
      if (num_stored % 8 == 0) bytes.push_back(0);
      if (number >> bit & 1) bytes.back() |= static_cast<uint8_t>(1 << num_stored % 8);
    }
  }
  void end_byte() { num_stored = 0; }

 private:
  size_t num_stored = 0;
};

// The mean of the numbers that `takes` holds for, or -1 where there are none.
template <typename Takes>
double mean_in_lanes(const std::vector<float>& numbers, Takes takes) {
  double lanes[32] = {};
  double count = 0;
  for (size_t j = 0; j < numbers.size(); ++j) {
    if (!takes(static_cast<double>(numbers[j]))) continue;
    lanes[j % 32] += static_cast<double>(numbers[j]);
    ++count;
  }
  for (int step = 16; step >= 1; step /= 2) {
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  }
  return count == 0 ? -1 : lanes[0] / count;
}

// The bits of the number as f32, cut to bf16.
uint32_t cut_to_bf16(double number) { return std::bit_cast<uint32_t>(static_cast<float>(number)) >> 16; }

// C[u][j] of the transform.
float cosine(int u, int j) {
  const double pi = std::acos(-1.0);
  return u == 0 ? 0.125f : static_cast<float>(std::sqrt(2.0 / 64) * std::cos(pi * (2 * j + 1) * u / 128));
}

using Square = std::vector<float>;  // 64 rows of 64

// out[a][b] = sum_j left(a, j) right(j, b), in the order of j.
template <typename Left, typename Right>
Square product(Left left, Right right) {
  Square out(kChunk);
  for (int a = 0; a < 64; ++a) {
    for (int b = 0; b < 64; ++b) {
      float sum = 0;
      for (int j = 0; j < 64; ++j) sum += left(a, j) * right(j, b);
      out[static_cast<size_t>(64 * a + b)] = sum;
    }
  }
  return out;
}

const Square& cosines() {
  static const Square all = [] {
    Square made(kChunk);
    for (int u = 0; u < 64; ++u) {
      for (int j = 0; j < 64; ++j) made[static_cast<size_t>(64 * u + j)] = cosine(u, j);
    }
    return made;
  }();
  return all;
}

auto rows_of(const Square& matrix) {
  return [&](int a, int b) { return matrix[static_cast<size_t>(64 * a + b)]; };
}
auto columns_of(const Square& matrix) {
  return [&](int a, int b) { return matrix[static_cast<size_t>(64 * b + a)]; };
}

Square coefficients_of(const float* x, size_t count) {
  Square scaled(kChunk);
  for (size_t i = 0; i < count; ++i) scaled[i] = x[i] / 64;
  const Square half = product(rows_of(cosines()), rows_of(scaled));
  return product(rows_of(half), columns_of(cosines()));
}

Square elements_of(const Square& coefficients) {
  const Square half = product(rows_of(coefficients), rows_of(cosines()));
  Square elements = product(columns_of(cosines()), rows_of(half));
  for (float& element : elements) {
    const float largest = std::numeric_limits<float>::max();
    element *= 64;
    if (std::fabs(element) > largest) element = std::copysign(largest, element);
  }
  return elements;
}

void add_chunk(const TopkChunk& chunk, const float* x, size_t count, ChunkOracle& result) {
  const size_t num_elements = count, kept = std::min(static_cast<size_t>(chunk.k), count);
  const bool finite = std::all_of(x, x + count, [](float value) { return std::isfinite(value); });
  Square coefficients;
  if (chunk.is_dct) {
    coefficients = coefficients_of(x, count);
    x = coefficients.data();
    count = kChunk;
  }
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (finite) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::fabs(x[a]) > std::fabs(x[b]); });
  }
  order.resize(kept);
  std::sort(order.begin(), order.end());
  std::vector<float> decoded(count, finite ? 0 : std::nanf("")), magnitudes;
  for (size_t index : order) magnitudes.push_back(std::fabs(x[index]));
  if (!chunk.has_2_bits) {
    for (size_t index : order) {
      if (finite) decoded[index] = x[index];
      result.add_bits(finite ? std::bit_cast<uint32_t>(x[index]) : 0x7fc00000u, 32);
    }
  } else if (!finite) {
    for (int level = 0; level < 2; ++level) result.add_bits(0x7fc0, 16);
    for (size_t j = 0; j < kept; ++j) result.add_bits(0, 2);
  } else {
    const double mean = mean_in_lanes(magnitudes, [](double) { return true; });
    const double low = mean_in_lanes(magnitudes, [&](double m) { return m <= mean; });
    const double high = mean_in_lanes(magnitudes, [&](double m) { return m > mean; });
    const uint32_t levels[2] = {cut_to_bf16(low), cut_to_bf16(high < 0 ? low : high)};
    const float lower = std::bit_cast<float>(levels[0] << 16), upper = std::bit_cast<float>(levels[1] << 16);
    for (uint32_t level : levels) result.add_bits(level, 16);
    for (size_t j = 0; j < kept; ++j) {
      const bool is_upper = magnitudes[j] > lower / 2 + upper / 2, is_negative = std::signbit(x[order[j]]);
      result.add_bits((is_upper ? 2u : 0u) + (is_negative ? 1u : 0u), 2);
      decoded[order[j]] = (is_negative ? -1.0f : 1.0f) * (is_upper ? upper : lower);
    }
  }
  result.end_byte();
  for (size_t index : order) result.add_bits(static_cast<uint32_t>(index), 12);
  result.end_byte();
  if (chunk.is_dct && finite) decoded = elements_of(decoded);
  result.decoded.insert(result.decoded.end(), decoded.begin(), decoded.begin() + static_cast<ptrdiff_t>(num_elements));
  result.num_nonfinite += !finite;
}

std::vector<float> clamped_to(DType dtype, std::vector<float> values) {
  const float largest = dtype == DType::kF32 ? std::numeric_limits<float>::max()
                                             : static_cast<float>(testing::half_format(dtype).largest);
  for (float& value : values) {
    if (std::fabs(value) > largest) value = std::copysign(largest, value);
  }
  return values;
}

// All three kernels, on bytes and halves that are misaligned by `skew`.
void expect_chunks(const TopkChunk& chunk, DType dtype, const std::vector<float>& values, size_t skew) {
  SCOPED_TRACE("k=" + std::to_string(chunk.k) + (chunk.has_2_bits ? " 2 bits " : " ") + std::string(dtype_name(dtype)) +
               " " + std::to_string(values.size()));
  ChunkOracle expected;
  for (size_t begin = 0; begin < values.size(); begin += kChunk) {
    add_chunk(chunk, values.data() + begin, std::min(kChunk, values.size() - begin), expected);
  }
  const size_t numel = values.size(), float_skew = dtype == DType::kF32 ? 4 * skew : skew;
  const int option = chunk.option();
  ASSERT_EQ(expected.bytes.size(), kernels::topk_chunk_wire_bytes(numel, option));
  Array source(numel * item_bytes(dtype), float_skew), bytes(expected.bytes.size(), skew);
  Array decoded(numel * item_bytes(dtype), float_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(dtype, source.data(), i, values[i]);
  fill_random(dtype, decoded.data(), numel, 49);  // what is 0 has to be written
  uint64_t num_nonfinite = 5;
  kernels::kTopkChunk.encode(option, dtype, source.data(), numel, bytes.data(), {}, &num_nonfinite, kCpu);
  EXPECT_EQ(num_nonfinite, 5 + expected.num_nonfinite);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  kernels::kTopkChunk.decode(option, dtype, bytes.data(), numel, decoded.data(), kCpu);
  expect_floats(dtype, decoded, clamped_to(dtype, expected.decoded));
  fill_random(DType::kF32, sums.data(), numel, 50);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  kernels::kTopkChunk.decode_add(option, bytes.data(), numel, sums.as<float>(), kCpu);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(TopkChunk, BytesOfAChunk) {
  EXPECT_EQ(kernels::topk_chunk_wire_bytes(4096, TopkChunk{64, true}.option()), 64u * 14 / 8 + 4);
  EXPECT_EQ(kernels::topk_chunk_wire_bytes(4096, TopkChunk{64, false}.option()), 64u * 44 / 8);
  EXPECT_EQ(kernels::topk_chunk_wire_bytes(2 * 4096 + 3, TopkChunk{8, true}.option()),
            2u * (8 * 14 / 8 + 4) + 4 + 1 + 5);
  EXPECT_EQ(kernels::topk_chunk_wire_bytes(0, TopkChunk{8, true}.option()), 0u);
}

TEST(TopkChunk, IsTheDefinition) {
  for (const TopkChunk& chunk : all_topk_chunks()) {
    for (DType dtype : kEncodable) {
      for (size_t numel : kSmallSizes) expect_chunks(chunk, dtype, random_values(dtype, numel, numel), numel % 4);
      for (size_t numel : kSizesOfChunks) expect_chunks(chunk, dtype, random_values(dtype, numel, 51), 1);
    }
  }
  for (DType dtype : kEncodable) expect_chunks({64, true}, dtype, random_values(dtype, kLargeSize, 52), 3);
}

TEST(TopkChunk, RandomBitPatterns) {
  for (const TopkChunk& chunk : all_topk_chunks()) {
    for (DType dtype : kEncodable) {
      for (uint64_t seed = 0; seed < 5; ++seed) expect_chunks(chunk, dtype, random_finite_bits(dtype, 9000, seed), 1);
    }
  }
}

// Few different magnitudes of both signs, so that ties stand everywhere and the threshold is one of them.
TEST(TopkChunk, OfEqualMagnitudesTheFirst) {
  std::mt19937_64 random(53);
  for (const TopkChunk& chunk : all_topk_chunks()) {
    for (uint64_t num_levels : {1, 2, 3, 100}) {
      std::vector<float> values(2 * kChunk + 300);
      for (float& value : values) {
        const float magnitude = static_cast<float>(random() % num_levels + 1) / 4;
        value = random() % 2 == 0 ? magnitude : -magnitude;
      }
      for (DType dtype : kEncodable) expect_chunks(chunk, dtype, values, 0);
    }
    for (uint32_t num_lower : {2u, 100u, 0x10100u}) {  // upper halves of the bits that agree
      std::vector<float> values(kChunk + 500);
      for (float& value : values) {
        value = std::bit_cast<float>(0x3f7fff00u + static_cast<uint32_t>(random() % num_lower));
      }
      expect_chunks(chunk, DType::kF32, values, 0);
    }
  }
}

TEST(TopkChunk, ChunksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const TopkChunk& chunk :
       {TopkChunk{8, false}, TopkChunk{8, true}, TopkChunk{256, true}, TopkChunk{64, true, true}}) {
    for (size_t numel : {size_t{1}, size_t{5}, size_t{256}, kChunk, kChunk + 1}) {
      for (float value : {0.0f, -0.0f, 1.0f, huge, -huge, tiny, -tiny, nan, -nan, HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        expect_chunks(chunk, DType::kF32, values, 1);
        values[numel / 2] = 1;
        expect_chunks(chunk, DType::kF32, values, 0);
        values.back() = -tiny;
        expect_chunks(chunk, DType::kF32, values, 0);
      }
    }
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const float largest = static_cast<float>(testing::half_format(dtype).largest);
      for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
        std::vector<float> values(kChunk + 9, value);
        values[1000] = 1;
        expect_chunks(chunk, dtype, values, 1);
      }
    }
  }
}

// Two bits lose of the kept squares of Gaussian values as much as the header says.
TEST(TopkChunk, SquaredErrorOfTwoBits) {
  std::mt19937_64 random(55);
  std::normal_distribution<float> normal;
  std::vector<float> values(200 * kChunk), decoded(values.size());
  for (float& value : values) value = normal(random);
  const int option = TopkChunk{64, true}.option();
  std::vector<uint8_t> bytes(kernels::topk_chunk_wire_bytes(values.size(), option));
  kernels::kTopkChunk.encode(option, DType::kF32, values.data(), values.size(), bytes.data(), {}, nullptr, kCpu);
  kernels::kTopkChunk.decode(option, DType::kF32, bytes.data(), values.size(), decoded.data(), kCpu);
  double lost = 0, kept = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (decoded[i] == 0) continue;
    lost += std::pow(static_cast<double>(values[i]) - static_cast<double>(decoded[i]), 2);
    kept += std::pow(static_cast<double>(values[i]), 2);
  }
  EXPECT_NEAR(lost / kept, 0.0043, 0.0004);
}

// The matrix is orthonormal up to its rounding: what all coefficients are kept of comes back.
TEST(TopkChunk, TheTransformIsOrthonormal) {
  const std::vector<float> values = random_values(DType::kF32, kChunk, 56);
  const Square coefficients = coefficients_of(values.data(), kChunk), back = elements_of(coefficients);
  double squares = 0, squares_of_coefficients = 0;
  for (size_t i = 0; i < kChunk; ++i) {
    squares += std::pow(static_cast<double>(values[i]), 2);
    squares_of_coefficients += std::pow(64 * static_cast<double>(coefficients[i]), 2);
  }
  EXPECT_NEAR(squares_of_coefficients / squares, 1, 1e-6);
  for (size_t i = 0; i < kChunk; ++i) ASSERT_NEAR(back[i], values[i], std::sqrt(squares) * 0x1p-17) << i;
}

// A cosine of one frequency in each direction is one coefficient.
TEST(TopkChunk, OneWaveIsOneCoefficient) {
  std::vector<float> wave(kChunk), decoded(kChunk);
  for (size_t i = 0; i < kChunk; ++i)
    wave[i] = cosine(5, static_cast<int>(i / 64)) * cosine(9, static_cast<int>(i % 64));
  const int option = TopkChunk{8, false, true}.option();
  std::vector<uint8_t> bytes(kernels::topk_chunk_wire_bytes(kChunk, option));
  kernels::kTopkChunk.encode(option, DType::kF32, wave.data(), kChunk, bytes.data(), {}, nullptr, kCpu);
  float largest = 0;
  for (size_t j = 0; j < 8; ++j) {
    const float value = static_cast<float>(testing::load_real(DType::kF32, bytes.data(), j));
    EXPECT_TRUE(std::fabs(value) < 1e-6f || std::fabs(value * 64 - 1) < 1e-6f) << value;
    largest = std::max(largest, value);
  }
  EXPECT_NEAR(largest * 64, 1, 1e-6);
  kernels::kTopkChunk.decode(option, DType::kF32, bytes.data(), kChunk, decoded.data(), kCpu);
  for (size_t i = 0; i < kChunk; ++i) ASSERT_NEAR(decoded[i], wave[i], 1e-6) << i;
}

// Indices past the end of their chunk are dropped; a level of Inf marks the chunk.
TEST(TopkChunk, DamagedMessages) {
  const size_t numel = 100;
  const TopkChunk chunk{8, true};
  ChunkOracle message;
  for (uint32_t level : {0x3f80u, 0x4000u}) message.add_bits(level, 16);
  for (uint32_t j = 0; j < 8; ++j) message.add_bits(j % 4, 2);
  for (uint32_t index : {0u, 1u, 98u, 99u, 100u, 101u, 2048u, 4095u}) message.add_bits(index, 12);
  std::vector<float> expected(numel);
  expected[0] = 1;
  expected[1] = -1;
  expected[98] = 2;
  expected[99] = -2;
  for (DType dtype : kEncodable) {
    Array decoded(numel * item_bytes(dtype), 4), sums(numel * 4, 4);
    kernels::kTopkChunk.decode(chunk.option(), dtype, message.bytes.data(), numel, decoded.data(), kCpu);
    expect_floats(dtype, decoded, expected);
    kernels::kTopkChunk.decode_add(chunk.option(), message.bytes.data(), numel, sums.as<float>(), kCpu);
    expect_floats(DType::kF32, sums, expected);
    decoded.expect_canary();
    sums.expect_canary();
  }
  for (size_t level : {0, 1}) {
    std::vector<uint8_t> bytes = message.bytes;
    bytes[2 * level] = 0x80;
    bytes[2 * level + 1] = 0x7f;
    std::vector<float> decoded(numel), sums(numel, 1.0f);
    kernels::kTopkChunk.decode(chunk.option(), DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
    kernels::kTopkChunk.decode_add(chunk.option(), bytes.data(), numel, sums.data(), kCpu);
    for (size_t i = 0; i < numel; ++i) ASSERT_TRUE(std::isnan(decoded[i]) && std::isnan(sums[i])) << i;
  }
}

TEST(TopkChunk, RejectsOtherK) {
  float x = 1;
  uint8_t bytes[8] = {};
  for (int k : {0, 4, 24, 511}) {
    const std::string message = "k is " + std::to_string(k) + ", expected 8, 16, 32, 64, 128 or 256";
    expect_invalid_argument([&] { kernels::kTopkChunk.encode(k, DType::kF32, &x, 1, bytes, {}, nullptr, kCpu); },
                            message);
    expect_invalid_argument([&] { kernels::kTopkChunk.decode_add(k, bytes, 1, &x, kCpu); }, message);
  }
}

}  // namespace
}  // namespace bagua

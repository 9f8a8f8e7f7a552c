// The sparsifier: bit for bit against the selection of its header done with a stable sort, for every type and k, on the
// blocks that are hard for a threshold: ties, values that agree in all but their last bits, fewer numbers than k; and
// that no message, however damaged, writes outside.
#include "csrc/kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::kBlockNumel;
using kernels::topk_wire_bytes;
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

constexpr int kKs[] = {8, 16, 32, 64, 128, 256};

struct TopkOracle {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  uint64_t num_nonfinite_blocks = 0;
};

TopkOracle oracle(int k, const std::vector<float>& values) {
  TopkOracle result;
  for (size_t begin = 0; begin < values.size(); begin += kBlockNumel) {
    const size_t count = std::min(kBlockNumel, values.size() - begin), kept = std::min<size_t>(k, count);
    const float* x = values.data() + begin;
    const bool finite = std::all_of(x, x + count, [](float value) { return std::isfinite(value); });
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    if (finite) {
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return std::fabs(x[a]) > std::fabs(x[b]); });
    }
    order.resize(kept);
    std::sort(order.begin(), order.end());
    const float nan = std::bit_cast<float>(0x7fc00000u);
    std::vector<float> decoded(count, finite ? 0 : nan);
    for (size_t index : order) {
      if (finite) decoded[index] = x[index];
      const uint32_t bits = std::bit_cast<uint32_t>(decoded[index]);
      for (int byte = 0; byte < 4; ++byte) result.bytes.push_back(static_cast<uint8_t>(bits >> 8 * byte));
    }
    for (size_t index : order) {
      for (int byte = 0; byte < 2; ++byte) result.bytes.push_back(static_cast<uint8_t>(index >> 8 * byte));
    }
    result.decoded.insert(result.decoded.end(), decoded.begin(), decoded.end());
    result.num_nonfinite_blocks += !finite;
  }
  return result;
}

// All three kernels, on bytes and halves that are misaligned by `skew`.
void expect_oracle(int k, DType dtype, const std::vector<float>& values, size_t skew) {
  SCOPED_TRACE("k=" + std::to_string(k) + " " + std::string(dtype_name(dtype)) + " " + std::to_string(values.size()));
  const TopkOracle expected = oracle(k, values);
  const size_t numel = values.size(), float_skew = dtype == DType::kF32 ? 4 * skew : skew;
  ASSERT_EQ(expected.bytes.size(), topk_wire_bytes(numel, k));
  Array source(numel * item_bytes(dtype), float_skew), bytes(expected.bytes.size(), skew);
  Array decoded(numel * item_bytes(dtype), float_skew), sums(numel * 4, 4);
  for (size_t i = 0; i < numel; ++i) store_real(dtype, source.data(), i, values[i]);
  fill_random(dtype, decoded.data(), numel, 49);  // what is 0 has to be written
  uint64_t num_nonfinite_blocks = 5;
  kernels::kTopk.encode(k, dtype, source.data(), numel, bytes.data(), {}, &num_nonfinite_blocks, kCpu);
  EXPECT_EQ(num_nonfinite_blocks, 5 + expected.num_nonfinite_blocks);
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  kernels::kTopk.decode(k, dtype, bytes.data(), numel, decoded.data(), kCpu);
  expect_floats(dtype, decoded, expected.decoded);
  fill_random(DType::kF32, sums.data(), numel, 50);
  std::vector<float> totals = expected.decoded;
  for (size_t i = 0; i < numel; ++i) totals[i] += sums.as<float>()[i];
  kernels::kTopk.decode_add(k, bytes.data(), numel, sums.as<float>(), kCpu);
  expect_floats(DType::kF32, sums, totals);
  bytes.expect_canary();
  decoded.expect_canary();
  sums.expect_canary();
}

TEST(Topk, IsTheSelection) {
  for (int k : kKs) {
    for (DType dtype : kEncodable) {
      for (size_t numel : kSmallSizes) expect_oracle(k, dtype, random_values(dtype, numel, numel), numel % 4);
      for (size_t numel : {7, 8, 9, 255, 256, 257, 3 * 2048 + 77}) {
        expect_oracle(k, dtype, random_values(dtype, numel, 51), 1);
      }
    }
  }
  for (DType dtype : kEncodable) expect_oracle(32, dtype, random_values(dtype, kLargeSize, 52), 3);
}

TEST(Topk, RandomBitPatterns) {
  for (int k : kKs) {
    for (DType dtype : kEncodable) {
      for (uint64_t seed = 0; seed < 10; ++seed) expect_oracle(k, dtype, random_finite_bits(dtype, 5000, seed), 1);
    }
  }
}

// Few different magnitudes of both signs, so that ties stand everywhere and the threshold is one of them.
TEST(Topk, OfEqualMagnitudesTheFirst) {
  std::mt19937_64 random(53);
  for (int k : kKs) {
    for (DType dtype : kEncodable) {
      for (uint64_t num_levels : {1, 2, 3, 10, 100}) {
        std::vector<float> values(2 * kBlockNumel + 300);
        for (float& value : values) {
          const float magnitude = static_cast<float>(random() % num_levels + 1) / 4;
          value = random() % 2 == 0 ? magnitude : -magnitude;
        }
        expect_oracle(k, dtype, values, 0);
      }
    }
  }
}

// Upper halves of the bits that agree, for all elements or around the threshold.
TEST(Topk, MagnitudesThatDifferInTheirLastBits) {
  std::mt19937_64 random(54);
  for (int k : kKs) {
    for (uint32_t num_lower : {2u, 100u, 0x10000u, 0x10100u, 0x30000u}) {
      std::vector<float> values(kBlockNumel + 500);
      for (float& value : values) {
        const uint32_t sign = random() % 2 == 0 ? 0x80000000u : 0;
        value = std::bit_cast<float>(sign | (0x3f7fff00u + static_cast<uint32_t>(random() % num_lower)));
      }
      expect_oracle(k, DType::kF32, values, 0);
      for (size_t i = 0; i < values.size(); i += 100) values[i] = 100;
      expect_oracle(k, DType::kF32, values, 0);
    }
  }
}

TEST(Topk, FewerNumbersThanK) {
  for (int k : kKs) {
    for (float zero : {0.0f, -0.0f}) {
      for (size_t stride : {11, 200, 3000}) {
        std::vector<float> values(kBlockNumel + 1000, zero);
        for (size_t i = 7; i < values.size(); i += stride) values[i] = -1 / static_cast<float>(i);
        expect_oracle(k, DType::kF32, values, 0);
        for (size_t i = 5; i < values.size(); i += stride) values[i] = std::bit_cast<float>(static_cast<uint32_t>(i));
        expect_oracle(k, DType::kF32, values, 0);  // subnormal
      }
    }
  }
}

TEST(Topk, BlocksThatBreakOthers) {
  const float nan = std::nanf(""), huge = std::numeric_limits<float>::max();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (int k : {8, 256}) {
    for (size_t numel : {size_t{1}, size_t{5}, size_t{256}, kBlockNumel, kBlockNumel + 1}) {
      for (float value : {0.0f, -0.0f, 1.0f, huge, -huge, tiny, -tiny, nan, -nan, HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> values(numel, value);
        expect_oracle(k, DType::kF32, values, 1);
        values[numel / 2] = 1;
        expect_oracle(k, DType::kF32, values, 0);
        values.back() = -tiny;
        expect_oracle(k, DType::kF32, values, 0);
      }
    }
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const float largest = static_cast<float>(testing::half_format(dtype).largest);
      for (float value : {-0.0f, largest, -largest, nan, -HUGE_VALF}) {
        std::vector<float> values(kBlockNumel + 9, value);
        values[1000] = 1;
        expect_oracle(k, dtype, values, 1);
      }
    }
  }
}

// |x - decoded|^2 <= (1 - k / elements) |x|^2, with equality where all magnitudes are equal.
TEST(Topk, IsAContraction) {
  for (int k : kKs) {
    for (size_t numel : {20, 300, 2048}) {
      for (uint64_t seed = 0; seed <= 10; ++seed) {
        std::vector<float> values = random_values(DType::kF32, numel, seed), decoded(numel);
        if (seed == 10) std::fill(values.begin(), values.end(), -0.7f);
        std::vector<uint8_t> bytes(topk_wire_bytes(numel, k));
        kernels::kTopk.encode(k, DType::kF32, values.data(), numel, bytes.data(), {}, nullptr, kCpu);
        kernels::kTopk.decode(k, DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
        double lost = 0, squares = 0;
        for (size_t i = 0; i < numel; ++i) {
          const double x = values[i], error = x - static_cast<double>(decoded[i]);
          lost += error * error;
          squares += x * x;
        }
        const double part = std::max(0.0, 1 - k / static_cast<double>(numel));
        EXPECT_LE(lost, part * squares * (1 + 1e-12));
        if (seed == 10) {
          EXPECT_NEAR(lost, part * squares, 1e-12 * squares);
        }
      }
    }
  }
}

// Indices past the end of their block are dropped; a first value of Inf marks the block.
TEST(Topk, DamagedMessages) {
  for (size_t numel : {size_t{100}, kBlockNumel}) {
    for (DType dtype : kEncodable) {
      Array bytes(topk_wire_bytes(numel, 8), 1), decoded(numel * item_bytes(dtype), 4), sums(numel * 4, 4);
      const uint16_t indices[8] = {
          0, 1, static_cast<uint16_t>(numel - 1), static_cast<uint16_t>(numel), 2048, 4096, 32768, 65535};
      for (int j = 0; j < 8; ++j) store_real(DType::kF32, bytes.data(), static_cast<size_t>(j), 3);
      std::memcpy(bytes.data() + 32, indices, 16);
      std::vector<float> expected(numel);
      expected[0] = expected[1] = expected[numel - 1] = 3;
      kernels::kTopk.decode(8, dtype, bytes.data(), numel, decoded.data(), kCpu);
      expect_floats(dtype, decoded, expected);
      kernels::kTopk.decode_add(8, bytes.data(), numel, sums.as<float>(), kCpu);
      expect_floats(DType::kF32, sums, expected);
      store_real(DType::kF32, bytes.data(), 0, -HUGE_VAL);
      std::fill(expected.begin(), expected.end(), std::nanf(""));
      kernels::kTopk.decode(8, dtype, bytes.data(), numel, decoded.data(), kCpu);
      expect_floats(dtype, decoded, expected);
      kernels::kTopk.decode_add(8, bytes.data(), numel, sums.as<float>(), kCpu);
      expect_floats(DType::kF32, sums, expected);
      decoded.expect_canary();
      sums.expect_canary();
    }
  }
}

TEST(Topk, RejectsOtherK) {
  float x = 1;
  uint8_t bytes[6] = {};
  for (int k : {0, 1, 4, 24, 512, -32}) {
    const std::string message = "k is " + std::to_string(k) + ", expected 8, 16, 32, 64, 128 or 256";
    expect_invalid_argument([&] { kernels::kTopk.encode(k, DType::kF32, &x, 1, bytes, {}, nullptr, kCpu); }, message);
    expect_invalid_argument([&] { kernels::kTopk.decode(k, DType::kF32, bytes, 1, &x, kCpu); }, message);
    expect_invalid_argument([&] { kernels::kTopk.decode_add(k, bytes, 1, &x, kCpu); }, message);
  }
}

}  // namespace
}  // namespace bagua

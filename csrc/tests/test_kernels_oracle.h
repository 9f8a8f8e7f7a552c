// The part that the kernel and codec tests share: element types in plain double arithmetic, written from the
// definitions of the formats and not from the kernels; arrays that are misaligned on purpose and notice a
// write past their end; the sizes and the random values.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/error.h"

namespace bagua::testing {

inline const size_t kSmallSizes[] = {0, 1, 3, 31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049};
inline constexpr size_t kLargeSize = size_t{1} << 18;
inline constexpr Stream kCpu{};
inline constexpr DType kFloats[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16};
inline constexpr DType kEncodable[] = {DType::kF32, DType::kF16, DType::kBF16};

// numel elements that begin offset_bytes after a 64-byte boundary, zeroed, with a canary behind them.
class Array {
 public:
  Array(size_t num_bytes, size_t offset_bytes)
      : storage_(num_bytes + offset_bytes + 64 + kCanaryBytes, kCanary), num_bytes_(num_bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(storage_.data());
    data_ = storage_.data() + (-begin & 63) + offset_bytes;
    std::memset(data_, 0, num_bytes_);
  }
  Array(const Array&) = delete;  // data_ points into storage_

  uint8_t* data() { return data_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  size_t size_bytes() const { return num_bytes_; }
  void assign(Array& other) { std::memcpy(data_, other.data_, num_bytes_); }

  void expect_canary() const {
    for (size_t i = 0; i < kCanaryBytes; ++i) ASSERT_EQ(data_[num_bytes_ + i], kCanary) << "written past the end";
  }

 private:
  static constexpr size_t kCanaryBytes = 64;
  static constexpr uint8_t kCanary = 0xa5;
  std::vector<uint8_t> storage_;
  size_t num_bytes_;
  uint8_t* data_;
};

struct HalfFormat {
  int mantissa_bits, smallest_exponent;
  double largest;
};

inline HalfFormat half_format(DType dtype) {
  if (dtype == DType::kF16) return {10, -14, 65504.0};
  return {7, -126, 0x1.fep127};
}

inline double half_value(DType dtype, uint16_t bits) {
  const HalfFormat format = half_format(dtype);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0x7fff >> format.mantissa_bits) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, format.smallest_exponent - format.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits),
                           exponent - 1 + format.smallest_exponent - format.mantissa_bits);
}

// Nearest even: the value in units of its last place, rounded by nearbyint. All but that is exact.
inline uint16_t half_bits(DType dtype, double value) {
  const HalfFormat format = half_format(dtype);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = static_cast<uint16_t>(0x7fff >> format.mantissa_bits << format.mantissa_bits);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | (1 << (format.mantissa_bits - 1)));
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), format.smallest_exponent);
  const double units = std::nearbyint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent));
  if (std::ldexp(units, exponent - format.mantissa_bits) > format.largest) return sign | infinity;
  const int field = (exponent - format.smallest_exponent) << format.mantissa_bits;
  return static_cast<uint16_t>(sign | (field + static_cast<int>(units)));
}

inline double load_real(DType dtype, const void* data, size_t i) {
  const uint8_t* at = static_cast<const uint8_t*>(data) + i * item_bytes(dtype);
  if (dtype == DType::kF64) {
    double value;
    std::memcpy(&value, at, 8);
    return value;
  }
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_value(dtype, bits);
}

inline void store_real(DType dtype, void* data, size_t i, double value) {
  uint8_t* at = static_cast<uint8_t*>(data) + i * item_bytes(dtype);
  if (dtype == DType::kF64) {
    std::memcpy(at, &value, 8);
  } else if (dtype == DType::kF32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(at, &narrow, 4);
  } else {
    const uint16_t bits = half_bits(dtype, value);
    std::memcpy(at, &bits, 2);
  }
}

// Little-endian: the low bytes are the wrapped value.
inline void store_integer(DType dtype, void* data, size_t i, int64_t value) {
  std::memcpy(static_cast<uint8_t*>(data) + i * item_bytes(dtype), &value, item_bytes(dtype));
}

inline int64_t load_integer(DType dtype, const void* data, size_t i) {
  int64_t value = 0;
  std::memcpy(&value, static_cast<const uint8_t*>(data) + i * item_bytes(dtype), item_bytes(dtype));
  if (dtype == DType::kI8) return static_cast<int8_t>(value);
  if (dtype == DType::kI32) return static_cast<int32_t>(value);
  return value;
}

// Values around 1 with a long tail for floating types, all bit patterns for integers.
inline void fill_random(DType dtype, void* data, size_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (size_t i = 0; i < numel; ++i) {
    if (is_floating(dtype)) {
      store_real(dtype, data, i, normal(random) * std::ldexp(1.0, static_cast<int>(random() % 9) - 4));
    } else {
      store_integer(dtype, data, i, static_cast<int64_t>(dtype == DType::kBool ? random() & 1 : random()));
    }
  }
}

// The values that fill_random writes, as the f32 that the type holds.
inline std::vector<float> random_values(DType dtype, size_t numel, uint64_t seed) {
  std::vector<uint8_t> data(numel * item_bytes(dtype));
  fill_random(dtype, data.data(), numel, seed);
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<float>(load_real(dtype, data.data(), i));
  return values;
}

inline std::vector<float> scaled(std::vector<float> values, float factor) {
  for (float& value : values) value *= factor;
  return values;
}

// Any finite bit pattern of the type: magnitudes from its smallest subnormal to its largest number side by side.
inline std::vector<float> random_finite_bits(DType dtype, size_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(numel);
  for (float& value : values) {
    do {
      const uint64_t bits = random();
      value = static_cast<float>(load_real(dtype, &bits, 0));
    } while (!std::isfinite(value));
  }
  return values;
}

// While it lives, this thread takes subnormal numbers for zeros, as torch.set_flush_denormal(True) asks the processor
// to.
class FlushToZero {
 public:
#if defined(__SSE__)
  static constexpr bool kIsPossible = true;
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }  // results, operands
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  static constexpr bool kIsPossible = false;
  FlushToZero() {}
#endif
 public:
  FlushToZero(const FlushToZero&) = delete;
};

inline bool same_bits(const void* a, const void* b, size_t num_bytes) {
  return num_bytes == 0 || std::memcmp(a, b, num_bytes) == 0;
}

// The bits of `expected` rounded to the type; where that is NaN, some NaN.
inline void expect_floats(DType dtype, Array& got, const std::vector<float>& expected) {
  ASSERT_EQ(got.size_bytes(), expected.size() * item_bytes(dtype));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = load_real(dtype, got.data(), i);
    if (std::isnan(expected[i])) {
      ASSERT_TRUE(std::isnan(value)) << value << " at " << i;
      continue;
    }
    uint8_t wanted[8];
    store_real(dtype, wanted, 0, expected[i]);
    ASSERT_TRUE(same_bits(got.data() + i * item_bytes(dtype), wanted, item_bytes(dtype)))
        << value << " instead of " << expected[i] << " at " << i;
  }
}

template <typename Body>
void expect_invalid_argument(Body body, const std::string& part_of_message) {
  try {
    body();
    FAIL() << "expected an Error that mentions " << part_of_message;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(part_of_message), std::string::npos) << error.what();
  }
}

}  // namespace bagua::testing

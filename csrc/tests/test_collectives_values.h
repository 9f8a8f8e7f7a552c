// Fixture values and double-precision oracles for the collectives' tests: x[rank][i] = i * size + rank,
// reduced to what the type represents exactly. Plain loops, independent of csrc/kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "csrc/common/dtype.h"

namespace bagua::testing {

using Bytes = std::vector<uint8_t>;

// value rounded to nearest even with `mantissa` explicit bits and the smallest exponent `min_exponent`.
inline double round_to(double value, int mantissa, int min_exponent) {
  if (value == 0 || !std::isfinite(value)) return value;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(value), min_exponent) - mantissa);
  return std::nearbyint(value / quantum) * quantum;
}

inline double representable(DType dtype, double value) {
  switch (dtype) {
    case DType::kF16: return round_to(value, 10, -14);
    case DType::kBF16: return round_to(value, 7, -126);
    case DType::kF32: return static_cast<float>(value);
    default: return value;
  }
}

// Bits of a finite, representable, not subnormal value of a 16-bit type.
inline uint16_t half_bits(double value, int mantissa, int bias) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(value);
  const auto fraction =
      static_cast<uint16_t>(std::ldexp(std::fabs(value), mantissa - exponent)) & ((1 << mantissa) - 1);
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | ((exponent + bias) << mantissa) | fraction);
}

inline double half_value(uint16_t bits, int mantissa, int bias) {
  const int exponent = (bits & 0x7fff) >> mantissa;
  const int fraction = bits & ((1 << mantissa) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                                         : std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <typename T>
void store_as(Bytes& array, size_t i, double value) {
  const T typed = static_cast<T>(value);
  std::memcpy(array.data() + i * sizeof(T), &typed, sizeof(T));
}
template <typename T>
double load_as(const Bytes& array, size_t i) {
  T typed;
  std::memcpy(&typed, array.data() + i * sizeof(T), sizeof(T));
  return static_cast<double>(typed);
}

inline void store(DType dtype, Bytes& array, size_t i, double value) {
  uint16_t bits = 0;
  switch (dtype) {
    case DType::kF32: return store_as<float>(array, i, value);
    case DType::kF64: return store_as<double>(array, i, value);
    case DType::kI8: return store_as<int8_t>(array, i, value);
    case DType::kU8:
    case DType::kBool: return store_as<uint8_t>(array, i, value);
    case DType::kI32: return store_as<int32_t>(array, i, value);
    case DType::kI64: return store_as<int64_t>(array, i, value);
    case DType::kF16: bits = half_bits(value, 10, 15); break;
    case DType::kBF16: bits = half_bits(value, 7, 127); break;
  }
  std::memcpy(array.data() + 2 * i, &bits, 2);
}

inline double load(DType dtype, const Bytes& array, size_t i) {
  uint16_t bits;
  switch (dtype) {
    case DType::kF32: return load_as<float>(array, i);
    case DType::kF64: return load_as<double>(array, i);
    case DType::kI8: return load_as<int8_t>(array, i);
    case DType::kU8:
    case DType::kBool: return load_as<uint8_t>(array, i);
    case DType::kI32: return load_as<int32_t>(array, i);
    case DType::kI64: return load_as<int64_t>(array, i);
    case DType::kF16:
    case DType::kBF16: break;
  }
  std::memcpy(&bits, array.data() + 2 * i, 2);
  return dtype == DType::kF16 ? half_value(bits, 10, 15) : half_value(bits, 7, 127);
}

// Different for every rank and element, exact in the type.
inline double value(DType dtype, ReduceOp op, size_t size, size_t rank, size_t i) {
  if (op == ReduceOp::kProduct) return static_cast<double>(1 + (i + rank) % 3);
  const size_t x = i * size + rank;
  switch (dtype) {
    case DType::kF16: return static_cast<double>(x % 1021);
    case DType::kBF16: return static_cast<double>(x % 251);
    case DType::kI8: return static_cast<double>(x % 101) - 50;
    case DType::kU8: return static_cast<double>(x % 201);
    case DType::kBool: return x % 3 == 0 ? 1 : 0;
    default: return static_cast<double>(x);
  }
}

inline Bytes values(DType dtype, ReduceOp op, size_t size, size_t rank, size_t numel) {
  Bytes array(numel * item_bytes(dtype));
  for (size_t i = 0; i < numel; ++i) store(dtype, array, i, value(dtype, op, size, rank, i));
  return array;
}

inline double wrap(DType dtype, double value) {
  const auto wide = static_cast<int64_t>(value);
  switch (dtype) {
    case DType::kI8: return static_cast<int8_t>(wide);
    case DType::kU8: return static_cast<uint8_t>(wide);
    case DType::kI32: return static_cast<int32_t>(wide);
    default: return value;
  }
}

inline double combine(ReduceOp op, double a, double b) {
  const auto x = static_cast<int64_t>(a), y = static_cast<int64_t>(b);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return a + b;
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    case ReduceOp::kBand: return static_cast<double>(x & y);
    case ReduceOp::kBor: return static_cast<double>(x | y);
    case ReduceOp::kBxor: return static_cast<double>(x ^ y);
  }
  return 0;
}

inline double expected(DType dtype, ReduceOp op, size_t size, size_t i) {
  double result = value(dtype, op, size, 0, i);
  for (size_t r = 1; r < size; ++r) result = combine(op, result, value(dtype, op, size, r, i));
  if (op == ReduceOp::kAvg) result /= static_cast<double>(size);
  return representable(dtype, wrap(dtype, result));
}

// Relative to the expected value. The sums of f16 and bf16 are exact in f32, so one rounding leaves no
// freedom; their averages may be rounded twice.
inline double tolerance(DType dtype, ReduceOp op) {
  if (dtype == DType::kF64) return 1e-14;
  if (dtype == DType::kF32) return 1e-6;
  if (op != ReduceOp::kAvg) return 0;
  return dtype == DType::kF16 ? 1.0 / 1024 : dtype == DType::kBF16 ? 1.0 / 128 : 0;
}

struct ReductionCase {
  DType dtype;
  ReduceOp op;
  size_t numel;
};

inline std::string name_of(const ReductionCase& c) {
  return std::string(reduce_op_name(c.op)) + " of " + std::to_string(c.numel) + " " + std::string(dtype_name(c.dtype));
}

// The sanitizers look at order and bounds, not at arithmetic, and are slow: they get every fifth case.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kCaseStride = 5;
#else
constexpr size_t kCaseStride = 1;
#endif

// Every defined pair at the small sizes, one pair of each kind at the large ones.
inline std::vector<ReductionCase> all_cases() {
  std::vector<ReductionCase> cases;
  for (const size_t numel : {0, 1, 3, 31, 33, 1023, 1025}) {
    for (int d = 0; d < kNumDTypes; ++d) {
      for (int o = 0; o < kNumReduceOps; ++o) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        if (is_defined(op, dtype)) cases.push_back({dtype, op, numel});
      }
    }
  }
  for (const size_t numel : {(size_t{1} << 16) + 1, size_t{1} << 18}) {
    for (const auto& [dtype, op] : {std::pair{DType::kF32, ReduceOp::kSum},
                                    {DType::kF32, ReduceOp::kAvg},
                                    {DType::kF16, ReduceOp::kSum},
                                    {DType::kBF16, ReduceOp::kAvg},
                                    {DType::kI64, ReduceOp::kSum},
                                    {DType::kI8, ReduceOp::kMax}}) {
      cases.push_back({dtype, op, numel});
    }
  }
  std::vector<ReductionCase> taken;
  for (size_t i = 0; i < cases.size(); i += kCaseStride) taken.push_back(cases[i]);
  taken.push_back({DType::kF32, ReduceOp::kSum, (size_t{5} << 19) + 17});  // more chunks than are under way
  taken.push_back({DType::kF64, ReduceOp::kMin, 7});                       // and small again after large
  return taken;
}

// FNV-1a of words, the last of which is filled up with zeros.
inline uint64_t hash_of(const Bytes& bytes) {
  uint64_t hash = 14695981039346656037ull ^ bytes.size();
  for (size_t i = 0; i < bytes.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, &bytes[i], std::min<size_t>(8, bytes.size() - i));
    hash = (hash ^ word) * 1099511628211ull;
  }
  return hash;
}

}  // namespace bagua::testing

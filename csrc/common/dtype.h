// Element types and reduction operators that cross the binding layer. The numeric values are the wire
// and ABI values: append, never renumber.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bagua {

enum class DType : uint8_t { kF32 = 0, kF64, kF16, kBF16, kI8, kU8, kI32, kI64, kBool };
inline constexpr int kNumDTypes = 9;

enum class ReduceOp : uint8_t { kSum = 0, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };
inline constexpr int kNumReduceOps = 8;

constexpr size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kI8:
    case DType::kU8:
    case DType::kBool: return 1;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::string_view names[kNumDTypes] = {"float32", "float64", "float16", "bfloat16", "int8",
                                                  "uint8",   "int32",   "int64",   "bool"};
  return names[static_cast<size_t>(dtype)];
}

constexpr std::string_view reduce_op_name(ReduceOp op) {
  constexpr std::string_view names[kNumReduceOps] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return names[static_cast<size_t>(op)];
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// True where the operator has a meaning for the type: bitwise operators for integers and bool, AVG for
// floating types only, no SUM or PRODUCT of bool.
constexpr bool is_defined(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct: return dtype != DType::kBool;
    case ReduceOp::kAvg: return is_floating(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax: return true;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: return !is_floating(dtype);
  }
  return false;
}

}  // namespace bagua

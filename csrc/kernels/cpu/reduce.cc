// CPU form of the reductions (contract: reduce.h). combine() is the one primitive, out = a op b on arrays:
// reduce_into is one call of it, reduce_many calls it on blocks that stay in L1.
//
// f16 and bf16 run on f32 blocks on the stack, through the array conversions of half.h.
#include "csrc/kernels/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "csrc/kernels/arithmetic/reduce.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace {

// The bytes that reduce_many takes from each array at a time.
constexpr size_t kBlockBytes = 8192;

template <typename T, typename Operator>
BAGUA_INLINE void map(Operator apply, const T* a, const T* b, T* out, size_t numel) {
  BAGUA_ELEMENTWISE
  for (size_t i = 0; i < numel; ++i) out[i] = apply(a[i], b[i]);
}

// out may be a or b; otherwise the arrays do not overlap. dispatch.cc has checked that op is defined.
template <typename T>
BAGUA_INLINE void combine_as(ReduceOp op, const T* a, const T* b, T* out, size_t numel) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return map(Sum{}, a, b, out, numel);
    case ReduceOp::kProduct: return map(Product{}, a, b, out, numel);
    case ReduceOp::kMin: return map(Min{}, a, b, out, numel);
    case ReduceOp::kMax: return map(Max{}, a, b, out, numel);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBand) return map(BitAnd{}, a, b, out, numel);
    if (op == ReduceOp::kBor) return map(BitOr{}, a, b, out, numel);
    if (op == ReduceOp::kBxor) return map(BitXor{}, a, b, out, numel);
  }
}

// Overloads, because a multiversioned function cannot be a template.
BAGUA_MULTIVERSION void combine(ReduceOp op, const float* a, const float* b, float* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}
BAGUA_MULTIVERSION void combine(ReduceOp op, const double* a, const double* b, double* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}
BAGUA_MULTIVERSION void combine(ReduceOp op, const int8_t* a, const int8_t* b, int8_t* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}
BAGUA_MULTIVERSION void combine(ReduceOp op, const uint8_t* a, const uint8_t* b, uint8_t* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}
BAGUA_MULTIVERSION void combine(ReduceOp op, const int32_t* a, const int32_t* b, int32_t* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}
BAGUA_MULTIVERSION void combine(ReduceOp op, const int64_t* a, const int64_t* b, int64_t* out, size_t numel) {
  combine_as(op, a, b, out, numel);
}

BAGUA_MULTIVERSION void multiply(float* data, float factor, size_t numel) {
  for (size_t i = 0; i < numel; ++i) data[i] *= factor;
}
BAGUA_MULTIVERSION void multiply(float* data, double factor, size_t numel) {
  for (size_t i = 0; i < numel; ++i) data[i] = finish(data[i], factor);
}
BAGUA_MULTIVERSION void multiply(double* data, double factor, size_t numel) {
  for (size_t i = 0; i < numel; ++i) data[i] *= factor;
}
BAGUA_MULTIVERSION void divide(double* data, double divisor, size_t numel) {
  for (size_t i = 0; i < numel; ++i) data[i] /= divisor;
}

// The product in f64, rounded once to f32. Where the factor is an f32 number, f32 gives the same bits.
void scale_f32(float* data, double factor, size_t numel) {
  const float narrow = static_cast<float>(factor);
  if (static_cast<double>(narrow) == factor) return multiply(data, narrow, numel);
  multiply(data, factor, numel);
}

// x * (1.0 / n) in f64 rounds to the f32 that x / n rounds to: the product is off by 2^-52 at most, and a
// normal quotient is at least 2^-25 / n away from where the rounding to f32 changes (both relative).
void average(float* data, int num_sources, size_t numel) { scale_f32(data, 1.0 / num_sources, numel); }
void average(double* data, int num_sources, size_t numel) { divide(data, num_sources, numel); }
template <typename T>
void average(T*, int, size_t) {}  // integers have no AVG

struct HalfConversions {
  void (*widen)(const unaligned_u16*, float*, size_t);
  void (*narrow)(const float*, unaligned_u16*, size_t);
};

HalfConversions conversions_of(DType dtype) {
  if (dtype == DType::kF16) return {widen_f16, narrow_f16};
  return {widen_bf16, narrow_bf16};
}

struct Arrays {
  const void* const* sources;
  int num_sources;
  void* const* destinations;
  int num_destinations;
};

// Copies the block at destinations[0], still in L1, to the others.
void copy_to_others(const Arrays& arrays, size_t offset_bytes, size_t num_bytes) {
  const uint8_t* first = static_cast<const uint8_t*>(arrays.destinations[0]) + offset_bytes;
  for (int d = 1; d < arrays.num_destinations; ++d) {
    uint8_t* other = static_cast<uint8_t*>(arrays.destinations[d]) + offset_bytes;
    if (other != first) std::memcpy(other, first, num_bytes);
  }
}

// In place is right because the first write to any destination's block, the last combine() of the block,
// comes after every other source's block has been read, and combine() itself is elementwise.
template <typename T>
void reduce_many_as(ReduceOp op, const Arrays& arrays, size_t numel) {
  constexpr size_t kBlockNumel = kBlockBytes / sizeof(T);
  alignas(64) T partial[kBlockNumel];
  const int last = arrays.num_sources - 1;
  const auto source = [&](int s) { return static_cast<const T*>(arrays.sources[s]); };
  T* const result = static_cast<T*>(arrays.destinations[0]);
  for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
    const size_t count = std::min(kBlockNumel, numel - begin);
    const T* sum = source(0) + begin;
    for (int s = 1; s < last; ++s) {
      combine(op, sum, source(s) + begin, partial, count);
      sum = partial;
    }
    if (last > 0) {
      combine(op, sum, source(last) + begin, result + begin, count);
    } else if (result != source(0)) {
      std::memcpy(result + begin, sum, count * sizeof(T));
    }
    if (op == ReduceOp::kAvg && last > 0) average(result + begin, arrays.num_sources, count);
    copy_to_others(arrays, begin * sizeof(T), count * sizeof(T));
  }
}

// In place is right: an element of every source is read before that element of any destination is written.
template <int kSources, int kDestinations, typename Factor>
BAGUA_INLINE void sum_rows(const Arrays& arrays, Factor factor, size_t numel) {
  const float* sources[kSources];
  float* destinations[kDestinations];
  for (int s = 0; s < kSources; ++s) sources[s] = static_cast<const float*>(arrays.sources[s]);
  for (int d = 0; d < kDestinations; ++d) destinations[d] = static_cast<float*>(arrays.destinations[d]);
  BAGUA_ELEMENTWISE
  for (size_t i = 0; i < numel; ++i) {
    float sum = sources[0][i];
    for (int s = 1; s < kSources; ++s) sum += sources[s][i];
    const float result = finish(sum, factor);
    for (int d = 0; d < kDestinations; ++d) destinations[d][i] = result;
  }
}

template <int kSources, typename Factor>
BAGUA_INLINE bool sum_rows_of(const Arrays& arrays, Factor factor, size_t numel) {
  const int num_destinations = arrays.num_destinations;
  if (num_destinations == 1) sum_rows<kSources, 1>(arrays, factor, numel);
  if (num_destinations == 2) sum_rows<kSources, 2>(arrays, factor, numel);
  if (num_destinations == kSources && kSources > 2) sum_rows<kSources, kSources>(arrays, factor, numel);
  return num_destinations <= 2 || num_destinations == kSources;
}

// The sum or average of a few ranks of one host, the commonest case: one pass without a second visit to the block
// (12 % faster than the general path for two ranks, 20 % for four). False where the number of arrays is another.
BAGUA_MULTIVERSION bool sum_few(const Arrays& arrays, float factor, size_t numel) {
  switch (arrays.num_sources) {
    case 2: return sum_rows_of<2>(arrays, factor, numel);
    case 4: return sum_rows_of<4>(arrays, factor, numel);
    default: return false;
  }
}
// 1/3 is no f32 number: the product is rounded from f64, as average() does.
BAGUA_MULTIVERSION bool sum_few(const Arrays& arrays, double factor, size_t numel) {
  return arrays.num_sources == 3 && sum_rows_of<3>(arrays, factor, numel);
}

void reduce_many_f32(ReduceOp op, const Arrays& arrays, size_t numel) {
  const double factor = op == ReduceOp::kAvg ? 1.0 / arrays.num_sources : 1.0;
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (is_sum && sum_few(arrays, static_cast<float>(factor), numel)) return;
  if (is_sum && sum_few(arrays, factor, numel)) return;
  reduce_many_as<float>(op, arrays, numel);
}

void reduce_many_half(ReduceOp op, DType dtype, const Arrays& arrays, size_t numel) {
  const auto [widen, narrow] = conversions_of(dtype);
  alignas(64) float partial[kHalfBlockNumel];
  alignas(64) float next[kHalfBlockNumel];
  for (size_t begin = 0; begin < numel; begin += kHalfBlockNumel) {
    const size_t count = std::min(kHalfBlockNumel, numel - begin);
    widen(static_cast<const unaligned_u16*>(arrays.sources[0]) + begin, partial, count);
    for (int s = 1; s < arrays.num_sources; ++s) {
      widen(static_cast<const unaligned_u16*>(arrays.sources[s]) + begin, next, count);
      combine(op, partial, next, partial, count);
    }
    if (op == ReduceOp::kAvg) average(partial, arrays.num_sources, count);
    narrow(partial, static_cast<unaligned_u16*>(arrays.destinations[0]) + begin, count);
    copy_to_others(arrays, begin * sizeof(uint16_t), count * sizeof(uint16_t));
  }
}

template <typename T>
void reduce_into_as(ReduceOp op, void* acc, const void* source, size_t numel) {
  combine(op, static_cast<const T*>(acc), static_cast<const T*>(source), static_cast<T*>(acc), numel);
}

// AVG of two sources without its division: SUM, rounded once.
void reduce_into_half(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel) {
  const void* const sources[] = {acc, source};
  void* const destinations[] = {acc};
  reduce_many_half(op == ReduceOp::kAvg ? ReduceOp::kSum : op, dtype, {sources, 2, destinations, 1}, numel);
}

}  // namespace

void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel) {
  switch (dtype) {
    case DType::kF32: return reduce_into_as<float>(op, acc, source, numel);
    case DType::kF64: return reduce_into_as<double>(op, acc, source, numel);
    case DType::kF16:
    case DType::kBF16: return reduce_into_half(op, dtype, acc, source, numel);
    case DType::kI8: return reduce_into_as<int8_t>(op, acc, source, numel);
    case DType::kU8:
    case DType::kBool: return reduce_into_as<uint8_t>(op, acc, source, numel);
    case DType::kI32: return reduce_into_as<int32_t>(op, acc, source, numel);
    case DType::kI64: return reduce_into_as<int64_t>(op, acc, source, numel);
  }
}

void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel) {
  if (num_destinations < 1) return;
  const Arrays arrays{sources, num_sources, destinations, num_destinations};
  switch (dtype) {
    case DType::kF32: return reduce_many_f32(op, arrays, numel);
    case DType::kF64: return reduce_many_as<double>(op, arrays, numel);
    case DType::kF16:
    case DType::kBF16: return reduce_many_half(op, dtype, arrays, numel);
    case DType::kI8: return reduce_many_as<int8_t>(op, arrays, numel);
    case DType::kU8:
    case DType::kBool: return reduce_many_as<uint8_t>(op, arrays, numel);
    case DType::kI32: return reduce_many_as<int32_t>(op, arrays, numel);
    case DType::kI64: return reduce_many_as<int64_t>(op, arrays, numel);
  }
}

void scale(DType dtype, void* data, double factor, size_t numel) {
  if (dtype == DType::kF32) return scale_f32(static_cast<float*>(data), factor, numel);
  if (dtype == DType::kF64) return multiply(static_cast<double*>(data), factor, numel);
  const auto [widen, narrow] = conversions_of(dtype);
  unaligned_u16* halves = static_cast<unaligned_u16*>(data);
  alignas(64) float block[kHalfBlockNumel];
  for (size_t begin = 0; begin < numel; begin += kHalfBlockNumel) {
    const size_t count = std::min(kHalfBlockNumel, numel - begin);
    widen(halves + begin, block, count);
    scale_f32(block, factor, count);
    narrow(block, halves + begin, count);
  }
}

}  // namespace bagua::kernels::cpu

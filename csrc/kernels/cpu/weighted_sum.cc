// CPU form of the weighted sum (contract: weighted_sum.h): blocks of f64 sums on the stack, which stay in L1.
#include "csrc/kernels/weighted_sum.h"

#include <algorithm>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace {

constexpr size_t kSumsNumel = 1024;

BAGUA_MULTIVERSION void multiply(const float* source, double weight, double* sums, size_t numel) {
  for (size_t i = 0; i < numel; ++i) sums[i] = weight * static_cast<double>(source[i]);
}
BAGUA_MULTIVERSION void multiply(const double* source, double weight, double* sums, size_t numel) {
  for (size_t i = 0; i < numel; ++i) sums[i] = weight * source[i];
}
BAGUA_MULTIVERSION void multiply_add(const float* source, double weight, double* sums, size_t numel) {
  for (size_t i = 0; i < numel; ++i) sums[i] += weight * static_cast<double>(source[i]);
}
BAGUA_MULTIVERSION void multiply_add(const double* source, double weight, double* sums, size_t numel) {
  for (size_t i = 0; i < numel; ++i) sums[i] += weight * source[i];
}
BAGUA_MULTIVERSION void round_to(const double* sums, float* destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = static_cast<float>(sums[i]);
}
BAGUA_MULTIVERSION void round_to(const double* sums, double* destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = sums[i];
}

// A block of every source has been read before the destination's is written, so it may be one of them.
template <typename T>
void weighted_sum_as(const void* const* sources, const double* weights, int num_sources, T* destination, size_t numel) {
  alignas(64) double sums[kSumsNumel];
  for (size_t begin = 0; begin < numel; begin += kSumsNumel) {
    const size_t count = std::min(kSumsNumel, numel - begin);
    multiply(static_cast<const T*>(sources[0]) + begin, weights[0], sums, count);
    for (int s = 1; s < num_sources; ++s) {
      multiply_add(static_cast<const T*>(sources[s]) + begin, weights[s], sums, count);
    }
    round_to(sums, destination + begin, count);
  }
}

void weighted_sum_half(DType dtype, const void* const* sources, const double* weights, int num_sources,
                       void* destination, size_t numel) {
  const auto widen = dtype == DType::kF16 ? widen_f16 : widen_bf16;
  const auto narrow = dtype == DType::kF16 ? narrow_f16 : narrow_bf16;
  alignas(64) double sums[kSumsNumel];
  alignas(64) float values[kSumsNumel];
  for (size_t begin = 0; begin < numel; begin += kSumsNumel) {
    const size_t count = std::min(kSumsNumel, numel - begin);
    for (int s = 0; s < num_sources; ++s) {
      widen(static_cast<const unaligned_u16*>(sources[s]) + begin, values, count);
      if (s == 0) {
        multiply(values, weights[s], sums, count);
      } else {
        multiply_add(values, weights[s], sums, count);
      }
    }
    round_to(sums, values, count);
    narrow(values, static_cast<unaligned_u16*>(destination) + begin, count);
  }
}

}  // namespace

void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel) {
  switch (dtype) {
    case DType::kF32: return weighted_sum_as(sources, weights, num_sources, static_cast<float*>(destination), numel);
    case DType::kF64: return weighted_sum_as(sources, weights, num_sources, static_cast<double*>(destination), numel);
    default: return weighted_sum_half(dtype, sources, weights, num_sources, destination, numel);
  }
}

}  // namespace bagua::kernels::cpu

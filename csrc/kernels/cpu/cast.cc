// CPU form of the float conversions (contract: cast.h). Pairs with f32 on one side run directly; pairs that
// widen a 16-bit float on the way go through a block of f32 on the stack, which is exact. f64 narrows to
// 16 bits in one step, because rounding to f32 first would round twice.
#include "csrc/kernels/cast.h"

#include <algorithm>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace {

BAGUA_MULTIVERSION void f64_to_f32(const double* __restrict source, float* __restrict destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = static_cast<float>(source[i]);
}

BAGUA_MULTIVERSION void f32_to_f64(const float* __restrict source, double* __restrict destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = static_cast<double>(source[i]);
}

BAGUA_MULTIVERSION void add_f32(const float* __restrict source, float* __restrict accumulator, size_t numel) {
  for (size_t i = 0; i < numel; ++i) accumulator[i] += source[i];
}

void from_f64(const double* source, DType to, void* destination, size_t numel) {
  if (to == DType::kF32) return f64_to_f32(source, static_cast<float*>(destination), numel);
  unaligned_u16* halves = static_cast<unaligned_u16*>(destination);
  for (size_t i = 0; i < numel; ++i) {
    halves[i] = to == DType::kF16 ? narrow_f64<10, 15>(source[i]) : narrow_f64<7, 127>(source[i]);
  }
}

void from_f32(const float* source, DType to, void* destination, size_t numel) {
  if (to == DType::kF64) return f32_to_f64(source, static_cast<double*>(destination), numel);
  const auto narrow = to == DType::kF16 ? narrow_f16 : narrow_bf16;
  narrow(source, static_cast<unaligned_u16*>(destination), numel);
}

void from_half(DType from, const unaligned_u16* source, DType to, void* destination, size_t numel) {
  const auto widen = from == DType::kF16 ? widen_f16 : widen_bf16;
  if (to == DType::kF32) return widen(source, static_cast<float*>(destination), numel);
  alignas(64) float block[kHalfBlockNumel];
  for (size_t begin = 0; begin < numel; begin += kHalfBlockNumel) {
    const size_t count = std::min(kHalfBlockNumel, numel - begin);
    widen(source + begin, block, count);
    from_f32(block, to, static_cast<uint8_t*>(destination) + begin * item_bytes(to), count);
  }
}

}  // namespace

void cast(DType from, const void* source, DType to, void* destination, size_t numel) {
  if (numel == 0) return;
  if (from == to) {
    std::memcpy(destination, source, numel * item_bytes(from));
  } else if (from == DType::kF64) {
    from_f64(static_cast<const double*>(source), to, destination, numel);
  } else if (from == DType::kF32) {
    from_f32(static_cast<const float*>(source), to, destination, numel);
  } else {
    from_half(from, static_cast<const unaligned_u16*>(source), to, destination, numel);
  }
}

void cast_add(DType from, const void* source, float* accumulator, size_t numel) {
  if (from == DType::kF32) return add_f32(static_cast<const float*>(source), accumulator, numel);
  const unaligned_u16* halves = static_cast<const unaligned_u16*>(source);
  const auto widen = from == DType::kF16 ? widen_f16 : widen_bf16;
  alignas(64) float block[kHalfBlockNumel];
  for (size_t begin = 0; begin < numel; begin += kHalfBlockNumel) {
    const size_t count = std::min(kHalfBlockNumel, numel - begin);
    widen(halves + begin, block, count);
    add_f32(block, accumulator + begin, count);
  }
}

}  // namespace bagua::kernels::cpu

// Array conversions between f32 and the 16-bit floats, called by the other CPU kernels.
//
// bf16 is a shift and vectorises by itself. For f16 the vectoriser of g++ 12 has no F16C, and the integer
// definition reaches 16 GB/s of f32 in cache where the instruction reaches 45: memory speed either way,
// but reductions and codecs convert blocks that are in cache, so there is an F16C body too. The 512-bit
// form of it gained nothing outside L1.
#include "csrc/kernels/cpu/half.h"

#if defined(BAGUA_TARGET_V3)
#include <immintrin.h>
#endif

namespace bagua::kernels::cpu {

BAGUA_MULTIVERSION void widen_bf16(const unaligned_u16* __restrict source, float* __restrict destination,
                                   size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = bf16_to_f32(source[i]);
}

BAGUA_MULTIVERSION void narrow_bf16(const float* __restrict source, unaligned_u16* __restrict destination,
                                    size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = f32_to_bf16(source[i]);
}

namespace {

void widen_baseline(const unaligned_u16* __restrict source, float* __restrict destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = f16_to_f32(source[i]);
}

void narrow_baseline(const float* __restrict source, unaligned_u16* __restrict destination, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = f32_to_f16(source[i]);
}

#if defined(BAGUA_TARGET_V3)

BAGUA_TARGET_V3 void widen_v3(const unaligned_u16* __restrict source, float* __restrict destination, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(destination + i, _mm256_cvtph_ps(half));
  }
  for (; i < numel; ++i) destination[i] = f16_to_f32(source[i]);
}

BAGUA_TARGET_V3 void narrow_v3(const float* __restrict source, unaligned_u16* __restrict destination, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i), half);
  }
  for (; i < numel; ++i) destination[i] = f32_to_f16(source[i]);
}

#endif

}  // namespace

void widen_f16(const unaligned_u16* source, float* destination, size_t numel) {
#if defined(BAGUA_TARGET_V3)
  if (BAGUA_HAS_V3) return widen_v3(source, destination, numel);
#endif
  widen_baseline(source, destination, numel);
}

void narrow_f16(const float* source, unaligned_u16* destination, size_t numel) {
#if defined(BAGUA_TARGET_V3)
  if (BAGUA_HAS_V3) return narrow_v3(source, destination, numel);
#endif
  narrow_baseline(source, destination, numel);
}

}  // namespace bagua::kernels::cpu

// CPU form of the copy into cold memory (contract: copy_to_cold.h): streaming stores, which fill whole cache
// lines without reading them first. memcpy where there are none.
#include "csrc/kernels/copy_to_cold.h"

#include <cstdint>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/multiversion.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bagua::kernels::cpu {
namespace {

constexpr size_t kLineBytes = 64;

// Whole cache lines; `to` is at the start of one, `from` has any alignment (the casts say nothing about it: loadu).
#if defined(BAGUA_TARGET_V3)
BAGUA_TARGET_V3 void stream_lines_v3(uint8_t* to, const uint8_t* from, size_t num_lines) {
  for (size_t i = 0; i < num_lines; ++i, to += kLineBytes, from += kLineBytes) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, b);
  }
  _mm_sfence();  // streaming stores are not ordered with the store that will publish them
}
#endif

void stream_lines_baseline(uint8_t* to, const uint8_t* from, size_t num_lines) {
#if defined(__x86_64__)
  for (size_t i = 0; i < num_lines; ++i, to += kLineBytes, from += kLineBytes) {
    const auto* line = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
#else
  std::memcpy(to, from, num_lines * kLineBytes);
#endif
}

void stream_lines(uint8_t* to, const uint8_t* from, size_t num_lines) {
#if defined(BAGUA_TARGET_V3)
  if (BAGUA_HAS_V3) return stream_lines_v3(to, from, num_lines);
#endif
  stream_lines_baseline(to, from, num_lines);
}

}  // namespace

void copy_to_cold(void* destination, const void* source, size_t bytes) {
  constexpr size_t kSmallestBytes = 64 << 10;  // below it stays in a first-level cache or next to it
  if (bytes < kSmallestBytes) {
    if (bytes > 0) std::memcpy(destination, source, bytes);
    return;
  }
  auto* to = static_cast<uint8_t*>(destination);
  const auto* from = static_cast<const uint8_t*>(source);
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t num_lines = (bytes - head) / kLineBytes;
  const size_t tail = head + num_lines * kLineBytes;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, num_lines);
  std::memcpy(to + tail, from + tail, bytes - tail);
}

}  // namespace bagua::kernels::cpu

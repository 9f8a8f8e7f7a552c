// CPU form of the copy into cold memory (contract: copy_to_cold.h): streaming stores of the baseline
// instruction set, which fill whole cache lines. memcpy where there are none.
#include "csrc/kernels/copy_to_cold.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "csrc/kernels/backend.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bagua::kernels::cpu {

void copy_to_cold(void* destination, const void* source, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLineBytes = 64;
  constexpr size_t kSmallestBytes = 64 << 10;  // below it stays in a first-level cache or next to it
  if (bytes >= kSmallestBytes) {
    auto* to = static_cast<uint8_t*>(destination);
    const auto* from = static_cast<const uint8_t*>(source);
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    std::memcpy(to, from, head);
    const size_t lines_bytes = (bytes - head) / kLineBytes * kLineBytes;
    for (size_t i = head; i < head + lines_bytes; i += kLineBytes) {
      // The casts say nothing about the source's alignment (loadu); the destination is at the start of a line.
      const auto* line = reinterpret_cast<const __m128i*>(from + i);
      auto* place = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(place, a);
      _mm_stream_si128(place + 1, b);
      _mm_stream_si128(place + 2, c);
      _mm_stream_si128(place + 3, d);
    }
    std::memcpy(to + head + lines_bytes, from + head + lines_bytes, bytes - head - lines_bytes);
    _mm_sfence();  // streaming stores are not ordered with the store that will publish them
    return;
  }
#endif
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

}  // namespace bagua::kernels::cpu

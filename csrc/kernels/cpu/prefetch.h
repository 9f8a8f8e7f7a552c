// Fetching the next block of a tensor while this one is encoded. An encoder reads its block twice: first it waits for
// memory and then it computes, and without a hint memory is idle meanwhile.
#pragma once

#include <cstddef>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {

inline constexpr size_t kPrefetchNumel = 256;  // elements that are encoded between two hints

// Asks for kPrefetchNumel elements from `next` on. That they lie behind the end of the tensor does no harm: a hint does
// not fault.
BAGUA_INLINE void prefetch(const float* next) {
  constexpr size_t kLineNumel = 64 / sizeof(float);
  for (size_t i = 0; i < kPrefetchNumel; i += kLineNumel) __builtin_prefetch(next + i);
}

}  // namespace bagua::kernels::cpu

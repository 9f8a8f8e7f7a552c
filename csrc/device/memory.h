// memcpy and memset in the order of a stream: on the CPU they are just that, now.
#pragma once

#include <cstring>

#include "csrc/device/runtime.h"

namespace bagua::device {

// Copies memory on the stream's device; the two do not overlap. Zero bytes are legal, of null too.
inline void copy(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (stream.is_cpu()) {
    std::memcpy(to, from, bytes);
  } else {
    runtime_of(stream.device).copy(to, from, bytes, stream);
  }
}

inline void fill_zero(void* memory, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  if (stream.is_cpu()) {
    std::memset(memory, 0, bytes);
  } else {
    runtime_of(stream.device).fill_zero(memory, bytes, stream);
  }
}

}  // namespace bagua::device

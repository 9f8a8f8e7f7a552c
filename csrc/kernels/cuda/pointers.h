// Arrays of pointers as kernels take them: by value, among the parameters, so that nothing is copied to the device.
#pragma once

#include <string>
#include <type_traits>

#include "csrc/kernels/cuda/memory.h"

namespace bagua::kernels::cuda {

// The most pointers that fit into 4 KB of parameters, with as many of something else: what a launch takes at no further
// cost.
inline constexpr int kFewPointers = 128;
// 32,764 bytes is what they may take since CUDA 12.1.
#if CUDART_VERSION >= 12010
inline constexpr int kMaxPointers = 1024;
#else
inline constexpr int kMaxPointers = kFewPointers;
#endif

// So many arrays at a time are on their way to a thread.
inline constexpr int kUnrolled = 4;

template <typename T, int kCapacity>
struct Pointers {
  Pointers(T* const* pointers, int num_pointers) : count(num_pointers) {
    for (int i = 0; i < num_pointers; ++i) {
      at[i] = pointers[i];
      are_aligned = are_aligned && is_aligned<16>(at[i]);
    }
  }

  T* at[kCapacity] = {};
  int count;
  bool are_aligned = true;  // to the longest vector
};

template <int kCapacity>
using Sources = Pointers<const void, kCapacity>;
template <int kCapacity>
using Destinations = Pointers<void, kCapacity>;

// Calls body(std::integral_constant<int, capacity>) with a capacity for `num_pointers`.
template <typename Body>
void for_capacity(const char* kernel, int num_pointers, Body body) {
  if (num_pointers > kMaxPointers) {
    throw Error(ErrorKind::kInvalidArgument, std::string(kernel) + ": " + std::to_string(num_pointers) +
                                                 " arrays, expected at most " + std::to_string(kMaxPointers) +
                                                 " on a CUDA device; combine them in several calls");
  }
  if (num_pointers <= kFewPointers) return body(std::integral_constant<int, kFewPointers>{});
  body(std::integral_constant<int, kMaxPointers>{});
}

}  // namespace bagua::kernels::cuda

// Arrays of pointers as kernels take them: by value, among the parameters, so that nothing is copied to the device.
#pragma once

#include <string>

#include "csrc/kernels/cuda/memory.h"

namespace bagua::kernels::cuda {

// 4 KB is what the parameters of a kernel may take.
inline constexpr int kMaxPointers = 128;

// So many arrays at a time are on their way to a thread.
inline constexpr int kUnrolled = 4;

template <typename T>
struct Pointers {
  Pointers(const char* kernel, T* const* pointers, int num_pointers) : count(num_pointers) {
    if (num_pointers > kMaxPointers) {
      throw Error(ErrorKind::kInvalidArgument, std::string(kernel) + ": " + std::to_string(num_pointers) +
                                                   " arrays, expected at most " + std::to_string(kMaxPointers) +
                                                   " on a CUDA device; combine them in several calls");
    }
    for (int i = 0; i < num_pointers; ++i) {
      at[i] = pointers[i];
      are_aligned = are_aligned && is_aligned<16>(at[i]);
    }
  }

  T* at[kMaxPointers] = {};
  int count;
  bool are_aligned = true;  // to the longest vector
};

using Sources = Pointers<const void>;
using Destinations = Pointers<void>;

}  // namespace bagua::kernels::cuda

// One grid whose blocks serve several arrays: which array a block is of. Among a kernel's parameters.
#pragma once

#include <cstddef>

#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {

template <int kCapacity>
struct SharedGrid {
  static_assert((kCapacity & (kCapacity - 1)) == 0);

  // The next array has so many blocks.
  void add(size_t num_blocks_of_it) {
    first_blocks[count++] = num_blocks;
    num_blocks += static_cast<unsigned>(num_blocks_of_it);
  }

  // The last one whose first block is not behind it: an array without elements has no blocks.
  __device__ __forceinline__ int array_of(unsigned block) const {
    int index = 0;
#pragma unroll
    for (int step = kCapacity / 2; step > 0; step /= 2) {
      if (index + step < count && first_blocks[index + step] <= block) index += step;
    }
    return index;
  }

  unsigned first_blocks[kCapacity] = {};
  unsigned num_blocks = 0;
  int count = 0;
};

}  // namespace bagua::kernels::cuda

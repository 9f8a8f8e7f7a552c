// Passes: several kernels over the same values, one after the other over a part that stays in a core's own cache, in
// place of each over everything.
#pragma once

#include <algorithm>
#include <cstddef>

#include "csrc/collectives/pieces.h"
#include "csrc/common/stream.h"

namespace bagua::collectives {

// 16 KiB of f32, two of which fit into a first-level cache.
inline constexpr size_t kPassNumel = 4 << 10;

// The most elements that for_each_pass hands out at once. Where a kernel has to be launched, that is all.
inline size_t largest_pass(size_t numel, size_t granule, Stream stream) {
  return stream.is_cpu() ? std::min(numel, round_up(kPassNumel, granule)) : numel;
}

// Calls body(first element, elements) for the parts of `numel` elements, cut at multiples of `granule`.
template <typename Body>
void for_each_pass(size_t numel, size_t granule, Stream stream, Body body) {
  const size_t most = largest_pass(numel, granule, stream);
  for (size_t begin = 0; begin < numel; begin += most) body(begin, std::min(most, numel - begin));
}

}  // namespace bagua::collectives

// How the collectives cut what they move: n elements into nearly equal ranges (one per rank), a range into chunks (one
// per round), and a chunk, where several kernels run over the same values, into tiles that stay in a core's own cache.
// All ranks cut alike, so sizes never travel.
#pragma once

#include <algorithm>
#include <cstddef>

#include "csrc/common/device.h"

namespace bagua::collectives {

struct Range {
  size_t begin = 0;
  size_t numel = 0;
};

constexpr size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0); }
constexpr size_t round_up(size_t a, size_t granule) { return divide_up(a, granule) * granule; }

// The index-th of `count` ranges of `numel` elements, cut at multiples of `granule`; earlier ranges are the
// larger ones.
constexpr Range partition(size_t numel, size_t count, size_t index, size_t granule = 1) {
  const size_t units = divide_up(numel, granule);
  const size_t base = units / count, extra = units % count;
  const size_t first = index * base + std::min(index, extra);
  const size_t last = first + base + (index < extra ? 1 : 0);
  const size_t begin = std::min(first * granule, numel);
  return {begin, std::min(last * granule, numel) - begin};
}

// The index-th chunk of `chunk_numel` elements of a range; short or empty at its end.
constexpr Range chunk_of(Range range, size_t chunk_numel, size_t index) {
  const size_t skipped = std::min(index * chunk_numel, range.numel);
  return {range.begin + skipped, std::min(chunk_numel, range.numel - skipped)};
}

// 16 KiB of f32, two of which fit into a first-level cache.
inline constexpr size_t kTileNumel = 4 << 10;

// The most elements that for_each_tile hands out at once. Where a kernel has to be launched, that is all.
inline size_t max_tile_numel(size_t numel, size_t granule, Stream stream) {
  return stream.is_cpu() ? std::min(numel, round_up(kTileNumel, granule)) : numel;
}

// Calls body(first element, elements) for the tiles of `numel` elements, cut at multiples of `granule`.
template <typename Body>
void for_each_tile(size_t numel, size_t granule, Stream stream, Body body) {
  const size_t most = max_tile_numel(numel, granule, stream);
  for (size_t begin = 0; begin < numel; begin += most) body(begin, std::min(most, numel - begin));
}

}  // namespace bagua::collectives

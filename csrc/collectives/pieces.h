// How the collectives cut what they move: n elements into nearly equal pieces (one per rank), a piece into
// chunks (one per round). All ranks cut alike, so sizes never travel.
#pragma once

#include <algorithm>
#include <cstddef>

namespace bagua::collectives {

struct Piece {
  size_t begin = 0;
  size_t numel = 0;
};

constexpr size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0); }
constexpr size_t round_up(size_t a, size_t granule) { return divide_up(a, granule) * granule; }

// The index-th of `count` pieces of `numel` elements, cut at multiples of `granule`; earlier pieces are the
// larger ones.
constexpr Piece piece_of(size_t numel, size_t count, size_t index, size_t granule = 1) {
  const size_t units = divide_up(numel, granule);
  const size_t base = units / count, extra = units % count;
  const size_t first = index * base + std::min(index, extra);
  const size_t last = first + base + (index < extra ? 1 : 0);
  const size_t begin = std::min(first * granule, numel);
  return {begin, std::min(last * granule, numel) - begin};
}

// The index-th chunk of `chunk_numel` elements of a piece; short or empty at its end.
constexpr Piece chunk_of(Piece piece, size_t chunk_numel, size_t index) {
  const size_t skipped = std::min(index * chunk_numel, piece.numel);
  return {piece.begin + skipped, std::min(chunk_numel, piece.numel - skipped)};
}

}  // namespace bagua::collectives

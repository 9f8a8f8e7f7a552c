// Parts: values that lie in several places, which a reduction takes in instead of its data. So gradients need not be
// copied into a bucket before they are encoded, and weights are copied there by the engine, not by who trains.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "csrc/collectives/pieces.h"

namespace bagua::collectives {

struct Part {
  size_t begin;  // the place of its first element in the data
  size_t numel;
  const void* values;
};

class Parts {
 public:
  Parts() = default;
  // Ascending and apart. What is between them is zero.
  explicit Parts(std::vector<Part> parts) : parts_(std::move(parts)) {}

  bool is_given() const { return !parts_.empty(); }

  // The values of `piece`, of `item` bytes each: where they lie, if that is one place, otherwise gathered in `scratch`.
  const void* read(Piece piece, size_t item, void* scratch) const {
    const size_t end = piece.begin + piece.numel;
    auto part = std::partition_point(parts_.begin(), parts_.end(),
                                     [&](const Part& one) { return one.begin + one.numel <= piece.begin; });
    if (part != parts_.end() && part->begin <= piece.begin && end <= part->begin + part->numel) {
      return static_cast<const uint8_t*>(part->values) + (piece.begin - part->begin) * item;
    }
    auto* to = static_cast<uint8_t*>(scratch);
    size_t at = piece.begin;
    for (; part != parts_.end() && part->begin < end; ++part) {
      const size_t first = std::max(part->begin, at), last = std::min(part->begin + part->numel, end);
      std::memset(to + (at - piece.begin) * item, 0, (first - at) * item);
      std::memcpy(to + (first - piece.begin) * item,
                  static_cast<const uint8_t*>(part->values) + (first - part->begin) * item, (last - first) * item);
      at = last;
    }
    std::memset(to + (at - piece.begin) * item, 0, (end - at) * item);
    return scratch;
  }

  // data <- the values, for who works on data alone. A part may lie in its own place there already.
  void copy_to(void* data, size_t numel, size_t item) const {
    auto* to = static_cast<uint8_t*>(data);
    size_t at = 0;
    for (const Part& part : parts_) {
      std::memset(to + at * item, 0, (part.begin - at) * item);
      if (part.values != to + part.begin * item) std::memcpy(to + part.begin * item, part.values, part.numel * item);
      at = part.begin + part.numel;
    }
    if (is_given()) std::memset(to + at * item, 0, (numel - at) * item);
  }

 private:
  std::vector<Part> parts_;
};

}  // namespace bagua::collectives

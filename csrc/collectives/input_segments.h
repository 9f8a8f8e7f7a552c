// InputSegments: values in several pieces of memory, which a reduction takes in instead of its data. So gradients need
// not be copied into a bucket before they are encoded, and weights are copied there by the engine, not by who trains.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/collectives/chunking.h"
#include "csrc/kernels/copy_segments.h"

namespace bagua::collectives {

struct InputSegment {
  size_t begin;  // offset of its first element in the data
  size_t numel;
  const void* values;
};

class InputSegments {
 public:
  InputSegments() = default;
  // Ascending and apart. What is between them is zero.
  explicit InputSegments(std::vector<InputSegment> segments) : segments_(std::move(segments)) {}

  bool is_given() const { return !segments_.empty(); }

  // The values of `range`, of `item` bytes each: where they lie, if that is one segment, otherwise gathered in
  // `scratch`.
  const void* read(Range range, size_t item, void* scratch, Stream stream) const {
    const size_t end = range.begin + range.numel;
    auto segment = std::partition_point(segments_.begin(), segments_.end(),
                                        [&](const InputSegment& one) { return one.begin + one.numel <= range.begin; });
    if (segment != segments_.end() && segment->begin <= range.begin && end <= segment->begin + segment->numel) {
      return static_cast<const uint8_t*>(segment->values) + (range.begin - segment->begin) * item;
    }
    auto* to = static_cast<uint8_t*>(scratch);
    std::vector<kernels::CopySegment> copies;
    size_t at = range.begin;
    for (; segment != segments_.end() && segment->begin < end; ++segment) {
      const size_t first = std::max(segment->begin, at), last = std::min(segment->begin + segment->numel, end);
      add(copies, to + (at - range.begin) * item, nullptr, (first - at) * item);
      add(copies, to + (first - range.begin) * item,
          static_cast<const uint8_t*>(segment->values) + (first - segment->begin) * item, (last - first) * item);
      at = last;
    }
    add(copies, to + (at - range.begin) * item, nullptr, (end - at) * item);
    kernels::copy_segments(copies.data(), static_cast<int>(copies.size()), stream);
    return scratch;
  }

  // data <- the values, for who works on data alone. A segment may lie at its own offset there already.
  void copy_to(void* data, size_t numel, size_t item, Stream stream) const {
    if (!is_given()) return;
    auto* to = static_cast<uint8_t*>(data);
    std::vector<kernels::CopySegment> copies;
    size_t at = 0;
    for (const InputSegment& segment : segments_) {
      add(copies, to + at * item, nullptr, (segment.begin - at) * item);
      if (segment.values != to + segment.begin * item) {
        add(copies, to + segment.begin * item, segment.values, segment.numel * item);
      }
      at = segment.begin + segment.numel;
    }
    add(copies, to + at * item, nullptr, (numel - at) * item);
    kernels::copy_segments(copies.data(), static_cast<int>(copies.size()), stream);
  }

 private:
  static void add(std::vector<kernels::CopySegment>& copies, void* to, const void* from, size_t num_bytes) {
    if (num_bytes > 0) copies.push_back({to, from, num_bytes});
  }

  std::vector<InputSegment> segments_;
};

}  // namespace bagua::collectives

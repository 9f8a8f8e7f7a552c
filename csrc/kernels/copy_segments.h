// Contract of the copy of many pieces of memory: gradients on their way into a bucket. Any sizes and alignments, 0
// included; no piece overlaps another one's destination. No allocation, no synchronisation; on a device one launch per
// kMaxCopySegments.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"

namespace bagua::kernels {

// The most that a launch takes: with so many its parameters fit into the 4 KB that every GPU has room for.
inline constexpr int kMaxCopySegments = 128;

struct CopySegment {
  void* to;
  const void* from;  // null: zeros
  size_t num_bytes;
};

void copy_segments(const CopySegment* segments, int num_segments, Stream stream);

}  // namespace bagua::kernels

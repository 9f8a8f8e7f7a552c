// CPU form of the copy of many pieces of memory; contract: copy_segments.h.
#include "csrc/kernels/copy_segments.h"

#include <cstring>

#include "csrc/kernels/backend.h"

namespace bagua::kernels::cpu {

void copy_segments(const CopySegment* segments, int num_segments) {
  for (int i = 0; i < num_segments; ++i) {
    const CopySegment& segment = segments[i];
    if (segment.num_bytes == 0) continue;  // of null, too
    if (segment.from != nullptr) {
      std::memcpy(segment.to, segment.from, segment.num_bytes);
    } else {
      std::memset(segment.to, 0, segment.num_bytes);
    }
  }
}

}  // namespace bagua::kernels::cpu

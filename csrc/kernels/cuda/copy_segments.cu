// CUDA form of the copy of many pieces of memory; contract: copy_segments.h. A block copies 16 KB of one segment, by 16
// bytes where both ends are aligned to that. A copy by itself is the copy engine's.
#include "csrc/kernels/copy_segments.h"

#include <algorithm>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/launch.h"
#include "csrc/kernels/cuda/memory.h"
#include "csrc/kernels/cuda/shared_grid.h"

namespace bagua::kernels::cuda {
namespace {

constexpr size_t kBlockBytes = 16 << 10;

struct Segments {
  Segments(const CopySegment* segments, int num_segments) {
    for (int i = 0; i < num_segments; ++i) {
      to[i] = static_cast<uint8_t*>(segments[i].to);
      from[i] = static_cast<const uint8_t*>(segments[i].from);
      num_bytes[i] = segments[i].num_bytes;
      grid.add(ceil_div(num_bytes[i], kBlockBytes));
    }
  }

  uint8_t* to[kMaxCopySegments] = {};
  const uint8_t* from[kMaxCopySegments] = {};
  size_t num_bytes[kMaxCopySegments] = {};
  SharedGrid<kMaxCopySegments> grid;
};
static_assert(sizeof(Segments) <= 4096);

// Copies, by the threads of the block in turn, what whole units there are. Returns how many bytes that are.
template <typename Unit>
__device__ __forceinline__ unsigned copy_units(uint8_t* to, const uint8_t* from, unsigned num_bytes) {
  const unsigned num_units = num_bytes / sizeof(Unit);
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < num_units; i += kNumThreads) {
    reinterpret_cast<Unit*>(to)[i] = from == nullptr ? Unit{} : reinterpret_cast<const Unit*>(from)[i];
  }
  return num_units * sizeof(Unit);
}

__global__ void __launch_bounds__(kNumThreads) copy_segments_kernel(const __grid_constant__ Segments segments) {
  const int index = segments.grid.array_of(blockIdx.x);
  const size_t begin = size_t{blockIdx.x - segments.grid.first_blocks[index]} * kBlockBytes;
  const size_t left = segments.num_bytes[index] - begin;
  const unsigned num_bytes = static_cast<unsigned>(left < kBlockBytes ? left : kBlockBytes);
  uint8_t* const to = segments.to[index] + begin;
  const uint8_t* const from = segments.from[index] == nullptr ? nullptr : segments.from[index] + begin;
  unsigned done = 0;
  if (is_aligned<16>(to) && is_aligned<16>(from)) {
    done = copy_units<uint4>(to, from, num_bytes);
  } else if (is_aligned<4>(to) && is_aligned<4>(from)) {
    done = copy_units<uint1>(to, from, num_bytes);
  }
  copy_units<uint8_t>(to + done, from == nullptr ? nullptr : from + done, num_bytes - done);
}

}  // namespace

void copy_segments(const CopySegment* segments, int num_segments, Stream stream) {
  if (num_segments == 1 && segments->from != nullptr) {
    return launch_copy("copy_segments", stream, segments->to, segments->from, segments->num_bytes);
  }
  const Segments all(segments, num_segments);
  launch("copy_segments", stream, all.grid.num_blocks, copy_segments_kernel, all);
}

}  // namespace bagua::kernels::cuda

// CUDA form of the digest; contract: digest.h. A warp reads a block of the digest by two loads of 16 bytes per lane,
// one in each half of it, so that a lane multiplies what it has loaded; its eight keys stay in registers. A block of
// threads takes 64 KB of one piece and adds up what its warps have found, by one atomic.
#include "csrc/kernels/digest.h"

#include "csrc/kernels/arithmetic/digest.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/launch.h"
#include "csrc/kernels/cuda/memory.h"
#include "csrc/kernels/cuda/shared_grid.h"

namespace bagua::kernels::cuda {
namespace {

constexpr size_t kGridBlockBytes = 64 << 10;
constexpr int kNumLoads = 2;  // of a lane, per block of the digest
constexpr int kNumWords = 4;  // of a load
constexpr size_t kLoadBytes = 4 * kNumWords;
constexpr size_t kHalfBytes = kDigestBlockBytes / 2;
static_assert(kWarpNumThreads * kLoadBytes == kHalfBytes);

struct Pieces {
  Pieces(const DigestPiece* pieces, int num_pieces, uint64_t* into) : digests(into) {
    for (int i = 0; i < num_pieces; ++i) {
      data[i] = static_cast<const uint8_t*>(pieces[i].data);
      num_bytes[i] = pieces[i].num_bytes;
      grid.add(num_bytes[i] == 0 ? 1 : ceil_div(num_bytes[i], kGridBlockBytes));
    }
  }

  const uint8_t* data[kDigestMaxPieces] = {};
  size_t num_bytes[kDigestMaxPieces] = {};
  SharedGrid<kDigestMaxPieces> grid;
  uint64_t* digests;
};
static_assert(sizeof(Pieces) <= 4096);

using Words = Elements<uint32_t, kNumWords>;

// Loads the words at `offset` of a piece; behind its end they are zeros.
__device__ __forceinline__ void load_words(const uint8_t* data, size_t offset, size_t num_bytes, Words& to) {
  const size_t left = offset < num_bytes ? num_bytes - offset : 0;
  if (left >= kLoadBytes && is_aligned<kLoadBytes>(data)) {
    load_vectors(reinterpret_cast<const uint32_t*>(data + offset), to);
    return;
  }
  const int num = static_cast<int>(left < kLoadBytes ? left : kLoadBytes);
#pragma unroll
  for (int i = 0; i < kNumWords; ++i) to.element[i] = load_bytes(data + offset + 4 * i, num - 4 * i);
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = kWarpNumThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__global__ void __launch_bounds__(kNumThreads) digest_kernel(const __grid_constant__ Pieces pieces) {
  const int index = pieces.grid.array_of(blockIdx.x);
  const unsigned grid_block = blockIdx.x - pieces.grid.first_blocks[index];
  const uint8_t* const data = pieces.data[index];
  const size_t num_bytes = pieces.num_bytes[index];
  const size_t begin = size_t{grid_block} * kGridBlockBytes;
  const size_t end = num_bytes - begin < kGridBlockBytes ? num_bytes : begin + kGridBlockBytes;
  const unsigned first_word = static_cast<unsigned>(lane_index() * kNumWords);
  uint32_t keys[kNumLoads][kNumWords];
#pragma unroll
  for (unsigned half = 0; half < kNumLoads; ++half) {
#pragma unroll
    for (unsigned i = 0; i < kNumWords; ++i) keys[half][i] = digest_key(half * (kHalfBytes / 4) + first_word + i);
  }
  uint64_t total = grid_block == 0 && thread_index() == 0 ? digest_of_size(num_bytes) : 0;
  for (size_t at = begin + static_cast<size_t>(warp_index()) * kDigestBlockBytes; at < end;
       at += kNumWarps * kDigestBlockBytes) {
    Words loaded[kNumLoads];
#pragma unroll
    for (unsigned half = 0; half < kNumLoads; ++half) {
      load_words(data, at + half * kHalfBytes + 4 * first_word, num_bytes, loaded[half]);
    }
    uint64_t products = 0;
    uint32_t words = 0;
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      const uint32_t low = loaded[0].element[i], high = loaded[1].element[i];
      products += static_cast<uint64_t>(low ^ keys[0][i]) * (high ^ keys[1][i]);
      words += low + high;
    }
    products = warp_sum(products);
    words = warp_sum(words);
    if (lane_index() == 0) total += digest_of_block(at / kDigestBlockBytes, products, words);
  }
  struct Totals {
    uint64_t of_warp[kNumWarps];
  };
  Totals& totals = shared_memory<Totals>();
  if (lane_index() == 0) totals.of_warp[warp_index()] = total;
  __syncthreads();
  if (thread_index() != 0) return;
  total = 0;
#pragma unroll
  for (int warp = 0; warp < kNumWarps; ++warp) total += totals.of_warp[warp];
  atomicAdd(reinterpret_cast<unsigned long long*>(pieces.digests + index), static_cast<unsigned long long>(total));
}

}  // namespace

void digest(const DigestPiece* pieces, int num_pieces, uint64_t* digests, Stream stream) {
  const Pieces all(pieces, num_pieces, digests);
  launch("digest", stream, all.grid.num_blocks, digest_kernel, all);
}

}  // namespace bagua::kernels::cuda

// CUDA form of the transform of arithmetic/dct.h: two products of 64 x 64 matrices by a thread block, in shared memory.
// A warp's threads have neighbouring columns, or rows, and the same factors, which are read from constant memory.
#pragma once

#include "csrc/kernels/arithmetic/dct.h"
#include "csrc/kernels/arithmetic/saturate.h"
#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {
namespace {

__constant__ const DctMatrix dct_matrix = make_dct_matrix(false);
__constant__ const DctMatrix dct_transposed = make_dct_matrix(true);

}  // namespace

inline constexpr int kDctOutputs = kDctSide * kDctSide / kNumThreads;  // of a thread

// An element more per row, so that neither rows nor columns meet in one bank.
struct DctTile {
  float of[kDctSide][kDctSide + 1];

  __device__ __forceinline__ float& at(int index) { return of[index / kDctSide][index % kDctSide]; }
};
// The transform is in place in the first; the second is for what is between.
struct DctTiles {
  DctTile values, between;

  __device__ __forceinline__ float& at(int index) { return values.at(index); }
};

// kIsColumn: to[m][n] = sum_j factors[j][m] from[j][n], else to[m][n] = sum_j from[m][j] factors[j][n], each in the
// order of j. All threads call it, after a barrier.
template <bool kIsColumn>
__device__ __forceinline__ void dct_product(const DctMatrix& factors, const DctTile& from, DctTile& to) {
  const int mine = thread_index() % kDctSide, first = thread_index() / kDctSide * kDctOutputs;
  float sums[kDctOutputs] = {};
#pragma unroll 2
  for (int j = 0; j < kDctSide; ++j) {
    const float value = kIsColumn ? from.of[j][mine] : from.of[mine][j];
#pragma unroll
    for (int i = 0; i < kDctOutputs; ++i) sums[i] += factors.row(j)[first + i] * value;
  }
#pragma unroll
  for (int i = 0; i < kDctOutputs; ++i) (kIsColumn ? to.of[first + i][mine] : to.of[mine][first + i]) = sums[i];
}

// The elements, which the caller has divided by kDctScale, become coefficients. All threads call it, after a barrier.
__device__ __forceinline__ void dct_forward(DctTiles& tiles) {
  dct_product<true>(dct_transposed, tiles.values, tiles.between);
  __syncthreads();
  dct_product<false>(dct_transposed, tiles.between, tiles.values);
  __syncthreads();
}

// The coefficients become elements, which the caller has yet to scale and to clamp.
__device__ __forceinline__ void dct_inverse(DctTiles& tiles) {
  dct_product<false>(dct_matrix, tiles.values, tiles.between);
  __syncthreads();
  dct_product<true>(dct_matrix, tiles.between, tiles.values);
  __syncthreads();
}

}  // namespace bagua::kernels::cuda

// The transform of codec `topk` with dct=1: the orthonormal DCT-II of 64 x 64 elements, for the CPU and for CUDA (DeMo,
// arXiv 2411.19870). cpu/dct.h and cuda/dct.h are its two forms.
//
// C[u][j] = f32(sqrt(2 / 64) cos(pi (2 j + 1) u / 128)), C[0][j] = 1 / 8. Of the elements x, the coefficients y:
//
//   forward: t[u][n] = sum_j C[u][j] (x[j][n] / 64); y[u][v] = sum_n t[u][n] C[v][n]
//   inverse: z[u][n] = sum_v y[u][v] C[v][n];        x[m][n] = clamp(64 sum_u C[u][m] z[u][n])
//
// In f32, every operation rounded by itself (no FMA), sums from +0 in the order of their index. The coefficients are
// those of the orthonormal transform divided by 64, and the clamp is to the largest finite number of the type that x
// has, so nothing overflows: no coefficient and no sum is above the largest magnitude of the elements. The matrix is
// rounded, so inverse(forward(x)) differs from x by up to 2^-17 of the root of the sum of squares, and by 2^-127.
#pragma once

#include <array>
#include <cstddef>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

inline constexpr int kDctSide = 64;
inline constexpr float kDctScale = 64.0f;

// cos(pi m / 128) / sqrt(32).
inline constexpr std::array<float, 65> kDctCosines = {
    0x1.6a09e6p-3f, 0x1.69edfcp-3f, 0x1.699a42p-3f, 0x1.690ec6p-3f, 0x1.684b9cp-3f,
    0x1.6750e4p-3f, 0x1.661ec2p-3f, 0x1.64b568p-3f, 0x1.63150cp-3f, 0x1.613deep-3f,
    0x1.5f3056p-3f, 0x1.5cec98p-3f, 0x1.5a730cp-3f, 0x1.57c414p-3f, 0x1.54e018p-3f,
    0x1.51c78cp-3f, 0x1.4e7aeap-3f, 0x1.4afab2p-3f, 0x1.474772p-3f, 0x1.4361bap-3f,
    0x1.3f4a24p-3f, 0x1.3b015p-3f,  0x1.3687eap-3f, 0x1.31dea2p-3f, 0x1.2d062ep-3f,
    0x1.27ff5p-3f,  0x1.22caccp-3f, 0x1.1d6972p-3f, 0x1.17dc14p-3f, 0x1.12238ep-3f,
    0x1.0c40c2p-3f, 0x1.063498p-3f, 0x1p-3f,        0x1.f347dcp-4f, 0x1.e642b8p-4f,
    0x1.d8f29ap-4f, 0x1.cb598cp-4f, 0x1.bd79aap-4f, 0x1.af5516p-4f, 0x1.a0edfep-4f,
    0x1.92469cp-4f, 0x1.836132p-4f, 0x1.74400ap-4f, 0x1.64e57cp-4f, 0x1.5553e4p-4f,
    0x1.458daap-4f, 0x1.35953cp-4f, 0x1.256d12p-4f, 0x1.1517a8p-4f, 0x1.049782p-4f,
    0x1.e7de5ep-5f, 0x1.c6427ap-5f, 0x1.a4608ap-5f, 0x1.823dc8p-5f, 0x1.5fdf76p-5f,
    0x1.3d4aep-5f,  0x1.1a855ep-5f, 0x1.ef2894p-6f, 0x1.a8fa12p-6f, 0x1.628a08p-6f,
    0x1.1be352p-6f, 0x1.aa21a8p-7f, 0x1.1c3af6p-7f, 0x1.1c50e2p-8f, 0.0f};

constexpr float dct_factor(int u, int j) {
  if (u == 0) return 0.125f;
  int angle = (2 * j + 1) * u % 256;
  if (angle > 128) angle = 256 - angle;
  return angle <= 64 ? kDctCosines[static_cast<size_t>(angle)] : -kDctCosines[static_cast<size_t>(128 - angle)];
}

struct alignas(64) DctMatrix {
  float of[kDctSide * kDctSide];  // row by row

  BAGUA_INLINE float* row(int m) { return of + m * kDctSide; }
  BAGUA_INLINE const float* row(int m) const { return of + m * kDctSide; }
};

constexpr DctMatrix make_dct_matrix(bool is_transposed) {
  DctMatrix matrix{};
  for (int u = 0; u < kDctSide; ++u) {
    for (int j = 0; j < kDctSide; ++j) {
      matrix.of[is_transposed ? j * kDctSide + u : u * kDctSide + j] = dct_factor(u, j);
    }
  }
  return matrix;
}

}  // namespace bagua::kernels

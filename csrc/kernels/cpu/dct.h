// CPU form of the transform of arithmetic/dct.h: products of 64 x 64 matrices, of which the compiler vectorises the
// columns. The caller is multiversioned.
#pragma once

#include <cstddef>
#include <limits>

#include "csrc/kernels/arithmetic/dct.h"
#include "csrc/kernels/arithmetic/saturate.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {

inline constexpr DctMatrix kDct = make_dct_matrix(false), kDctTransposed = make_dct_matrix(true);

// product = a b, with each sum in the order of the index. The terms of a zero in `a` are left out: they would change no
// sum, because that is never -0.
BAGUA_INLINE void multiply(const DctMatrix& a, const DctMatrix& b, DctMatrix& product) {
  for (int m = 0; m < kDctSide; ++m) {
    float sums[kDctSide] = {};
    for (int j = 0; j < kDctSide; ++j) {
      const float factor = a.row(m)[j];
      if (factor == 0.0f) continue;
      for (int n = 0; n < kDctSide; ++n) sums[n] += factor * b.row(j)[n];
    }
    for (int n = 0; n < kDctSide; ++n) product.row(m)[n] = sums[n];
  }
}

// The elements become coefficients.
BAGUA_INLINE void dct_forward(DctMatrix& values) {
  DctMatrix columns;
  for (float& value : values.of) value *= 1.0f / kDctScale;
  multiply(kDct, values, columns);
  multiply(columns, kDctTransposed, values);
}

// The coefficients become elements, clamped to the range of f32.
BAGUA_INLINE void dct_inverse(DctMatrix& values) {
  DctMatrix rows;
  multiply(values, kDct, rows);
  multiply(kDctTransposed, rows, values);
  for (float& value : values.of) value = saturated(value * kDctScale, std::numeric_limits<float>::max());
}

}  // namespace bagua::kernels::cpu

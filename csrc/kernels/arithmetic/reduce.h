// The operators of the reductions on one element (contract: reduce.h), for the CPU and for CUDA.
//
// Integer sums and products run on the unsigned type, where wrapping is defined.
#pragma once

#include <type_traits>

#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

template <typename T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

struct Sum {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
  }
};
struct Product {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
  }
};
// A NaN in b makes the comparison false and takes b; a NaN in a takes a. For integers a != a is nothing.
struct Min {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return ((a <= b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return ((a >= b) | (a != a)) ? a : b;
  }
};
struct BitAnd {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <typename T>
  BAGUA_INLINE T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

// Scales an f32 number as `scale` does: the product in f64, rounded once. Where the factor is an f32 number, f32 gives
// the same bits.
BAGUA_INLINE float finish(float sum, float factor) { return sum * factor; }
BAGUA_INLINE float finish(float sum, double factor) { return static_cast<float>(static_cast<double>(sum) * factor); }

}  // namespace bagua::kernels

// Adam's step of one element (contract: adam.h), for the CPU and for CUDA.
#pragma once

#include <cmath>

#include "csrc/kernels/adam.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels {

// The options in the type that is computed in.
template <typename T>
struct AdamFactors {
  explicit AdamFactors(const AdamOptions& options)
      : rest1(static_cast<T>(1 - options.beta1)),
        beta1(1 - rest1),
        beta2(static_cast<T>(options.beta2)),
        rest2(static_cast<T>(1 - options.beta2)),
        eps(static_cast<T>(options.eps)),
        weight_decay(static_cast<T>(options.weight_decay)),
        is_near(rest1 < static_cast<T>(0.5)) {}

  T rest1, beta1, beta2, rest2, eps, weight_decay;
  bool is_near;  // m moves less than half of the way to g
};

template <bool kIsFrozen, typename T>
BAGUA_INLINE void update_adam(const AdamFactors<T>& by, T step_size, T correction, T& x, T g, T& m, T& v) {
  if (by.weight_decay != 0) g += by.weight_decay * x;
  const T distance = g - m;
  m = by.is_near ? m + by.rest1 * distance : g - distance * by.beta1;
  if constexpr (kIsFrozen) {
    m *= v > 0 ? static_cast<T>(1) : static_cast<T>(0);
  } else {
    v = v * by.beta2 + by.rest2 * g * g;
  }
  x += step_size * m / (std::sqrt(v) / correction + by.eps);
}

}  // namespace bagua::kernels

// Contract of the step of bagua.optim.QAdam: Adam, whose second moment may stand still, of many tensors at once.
//
// With g the gradient, plus weight_decay * x where that is not 0:
//
//   m <- m + (1 - beta1) (g - m)                       from 1 - beta1 = 0.5 on as g - (g - m) beta1
//   v <- beta2 v + (1 - beta2) g g                     not where it is frozen: there m <- m * (1 where v > 0, else 0)
//   x <- x + (step_size m) / (sqrt(v) / correction + eps)
//
// f16 and bf16 are computed in f32 and rounded once, when they are stored; f64 in f64. Each operation rounds, so that
// the CPU and a GPU give the same bits. NaN and infinity propagate. numel 0 is legal. Pointers need only be aligned to
// the element; no array overlaps another. No allocation, no synchronisation; on a device one launch per
// kAdamMaxTensors.
#pragma once

#include <cstddef>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace bagua::kernels {

// The most that a launch takes: with so many its parameters fit into the 4 KB that every GPU has room for.
inline constexpr int kAdamMaxTensors = 64;

struct AdamTensor {
  void *parameter, *grad, *exp_avg, *exp_avg_sq;  // x, g, m, v; g is only read
  size_t numel;
  double step_size;   // -lr / (1 - beta1^t)
  double correction;  // sqrt(1 - beta2^t), t standing still where v does
};

struct AdamOptions {
  double beta1, beta2, eps, weight_decay;
  bool is_frozen;
};

// All of one type in {f32, f64, f16, bf16}.
void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream);

}  // namespace bagua::kernels

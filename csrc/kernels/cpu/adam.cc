// CPU form of Adam's step (contract: adam.h): one pass over the memory, in blocks that stay in L1 where the types are
// converted.
#include "csrc/kernels/adam.h"

#include <algorithm>

#include "csrc/kernels/arithmetic/adam.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/half.h"

namespace bagua::kernels::cpu {
namespace {

constexpr size_t kAdamBlockNumel = 1024;

template <typename T>
struct AdamArrays {
  T *x, *g, *m, *v;
};

template <bool kIsFrozen, typename T>
BAGUA_INLINE void update_adam_all(const AdamFactors<T>& factors, T step_size, T correction, const AdamArrays<T>& at,
                                  size_t numel) {
  // Copies: what is behind a reference could be what the loop stores to.
  const AdamFactors<T> by = factors;
  T *const x = at.x, *const m = at.m, *const v = at.v;
  const T* const g = at.g;
  BAGUA_ELEMENTWISE
  for (size_t i = 0; i < numel; ++i) {
    T parameter = x[i], exp_avg = m[i], exp_avg_sq = v[i];
    update_adam<kIsFrozen>(by, step_size, correction, parameter, g[i], exp_avg, exp_avg_sq);
    x[i] = parameter;
    m[i] = exp_avg;
    if constexpr (!kIsFrozen) v[i] = exp_avg_sq;
  }
}

// Overloads, because a multiversioned function cannot be a template.
BAGUA_MULTIVERSION void update_warm(const AdamFactors<float>& by, float step_size, float correction,
                                    const AdamArrays<float>& at, size_t numel) {
  update_adam_all<false>(by, step_size, correction, at, numel);
}
BAGUA_MULTIVERSION void update_warm(const AdamFactors<double>& by, double step_size, double correction,
                                    const AdamArrays<double>& at, size_t numel) {
  update_adam_all<false>(by, step_size, correction, at, numel);
}
BAGUA_MULTIVERSION void update_frozen(const AdamFactors<float>& by, float step_size, float correction,
                                      const AdamArrays<float>& at, size_t numel) {
  update_adam_all<true>(by, step_size, correction, at, numel);
}
BAGUA_MULTIVERSION void update_frozen(const AdamFactors<double>& by, double step_size, double correction,
                                      const AdamArrays<double>& at, size_t numel) {
  update_adam_all<true>(by, step_size, correction, at, numel);
}

// A step of the tensors of one call.
template <typename T>
struct AdamStep {
  explicit AdamStep(const AdamOptions& options) : factors(options), is_frozen(options.is_frozen) {}

  void run(const AdamTensor& tensor, const AdamArrays<T>& at, size_t numel) const {
    const T step_size = static_cast<T>(tensor.step_size), correction = static_cast<T>(tensor.correction);
    if (is_frozen) {
      update_frozen(factors, step_size, correction, at, numel);
    } else {
      update_warm(factors, step_size, correction, at, numel);
    }
  }

  AdamFactors<T> factors;
  bool is_frozen;
};

template <typename T>
void step_as(const AdamStep<T>& step, const AdamTensor& tensor) {
  const auto of = [](void* array) { return static_cast<T*>(array); };
  step.run(tensor, {of(tensor.parameter), of(tensor.grad), of(tensor.exp_avg), of(tensor.exp_avg_sq)}, tensor.numel);
}

void step_half(DType dtype, const AdamStep<float>& step, const AdamTensor& tensor) {
  const auto widen = dtype == DType::kF16 ? widen_f16 : widen_bf16;
  const auto narrow = dtype == DType::kF16 ? narrow_f16 : narrow_bf16;
  alignas(64) float x[kAdamBlockNumel], g[kAdamBlockNumel], m[kAdamBlockNumel], v[kAdamBlockNumel];
  for (size_t begin = 0; begin < tensor.numel; begin += kAdamBlockNumel) {
    const size_t count = std::min(kAdamBlockNumel, tensor.numel - begin);
    const auto from = [=](void* array) { return static_cast<unaligned_u16*>(array) + begin; };
    widen(from(tensor.parameter), x, count);
    widen(from(tensor.grad), g, count);
    widen(from(tensor.exp_avg), m, count);
    widen(from(tensor.exp_avg_sq), v, count);
    step.run(tensor, {x, g, m, v}, count);
    narrow(x, from(tensor.parameter), count);
    narrow(m, from(tensor.exp_avg), count);
    if (!step.is_frozen) narrow(v, from(tensor.exp_avg_sq), count);
  }
}

}  // namespace

void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options) {
  if (dtype == DType::kF64) {
    const AdamStep<double> step(options);
    for (int i = 0; i < num_tensors; ++i) step_as(step, tensors[i]);
    return;
  }
  const AdamStep<float> step(options);
  for (int i = 0; i < num_tensors; ++i) {
    if (dtype == DType::kF32) {
      step_as(step, tensors[i]);
    } else {
      step_half(dtype, step, tensors[i]);
    }
  }
}

}  // namespace bagua::kernels::cpu

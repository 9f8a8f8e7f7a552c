// CUDA form of Adam's step; contract: adam.h. Blocks of one grid serve all tensors of a launch: a block looks up whose
// it is, and a thread takes 16 bytes of each of the four arrays, 8 of 16-bit types, whose numbers in f32 would fill the
// registers.
#include "csrc/kernels/adam.h"

#include <type_traits>

#include "csrc/kernels/arithmetic/adam.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/launch.h"
#include "csrc/kernels/cuda/memory.h"
#include "csrc/kernels/cuda/shared_grid.h"

namespace bagua::kernels::cuda {
namespace {

// Floating<the type>
template <typename Convert>
using Computed = decltype(Convert::widen({}));

// The elements that a thread takes of each array.
template <typename Convert>
inline constexpr int kThreadNumel = std::is_same_v<Computed<Convert>, double> ? 2 : 4;

// T: what is computed in.
template <typename T>
struct Tensors {
  Tensors(const AdamTensor* tensors, int num_tensors, const AdamOptions& options, size_t block_numel)
      : factors(options) {
    for (int i = 0; i < num_tensors; ++i) {
      const AdamTensor& tensor = tensors[i];
      parameters[i] = tensor.parameter;
      grads[i] = tensor.grad;
      exp_avgs[i] = tensor.exp_avg;
      exp_avg_sqs[i] = tensor.exp_avg_sq;
      numels[i] = tensor.numel;
      step_sizes[i] = static_cast<T>(tensor.step_size);
      corrections[i] = static_cast<T>(tensor.correction);
      grid.add(ceil_div(tensor.numel, block_numel));
    }
  }

  void* parameters[kAdamMaxTensors] = {};
  void* grads[kAdamMaxTensors] = {};
  void* exp_avgs[kAdamMaxTensors] = {};
  void* exp_avg_sqs[kAdamMaxTensors] = {};
  size_t numels[kAdamMaxTensors] = {};
  T step_sizes[kAdamMaxTensors] = {};
  T corrections[kAdamMaxTensors] = {};
  SharedGrid<kAdamMaxTensors> grid;
  AdamFactors<T> factors;
};
static_assert(sizeof(Tensors<double>) <= 4096);

template <typename Convert, bool kIsFrozen>
__global__ void __launch_bounds__(kNumThreads) adam_kernel(const __grid_constant__ Tensors<Computed<Convert>> tensors) {
  using Stored = typename Convert::Stored;
  using T = Computed<Convert>;
  constexpr int kNumel = kThreadNumel<Convert>;
  const int index = tensors.grid.array_of(blockIdx.x);
  const size_t numel = tensors.numels[index];
  const size_t first = (size_t{blockIdx.x - tensors.grid.first_blocks[index]} * kNumThreads + threadIdx.x) * kNumel;
  if (first >= numel) return;
  const int num = numel - first < kNumel ? static_cast<int>(numel - first) : kNumel;
  Stored* const parameter = static_cast<Stored*>(tensors.parameters[index]) + first;
  const Stored* const grad = static_cast<const Stored*>(tensors.grads[index]) + first;
  Stored* const exp_avg = static_cast<Stored*>(tensors.exp_avgs[index]) + first;
  Stored* const exp_avg_sq = static_cast<Stored*>(tensors.exp_avg_sqs[index]) + first;
  Elements<Stored, kNumel> x, g, m, v;
  load(parameter, num, Stored{0}, x);
  load(grad, num, Stored{0}, g);
  load(exp_avg, num, Stored{0}, m);
  load(exp_avg_sq, num, Stored{0}, v);
  const T step_size = tensors.step_sizes[index], correction = tensors.corrections[index];
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    T wide_x = Convert::widen(x.element[i]), wide_m = Convert::widen(m.element[i]),
      wide_v = Convert::widen(v.element[i]);
    update_adam<kIsFrozen>(tensors.factors, step_size, correction, wide_x, Convert::widen(g.element[i]), wide_m,
                           wide_v);
    x.element[i] = Convert::narrow(wide_x);
    m.element[i] = Convert::narrow(wide_m);
    v.element[i] = Convert::narrow(wide_v);
  }
  store(x, num, parameter);
  store(m, num, exp_avg);
  if constexpr (!kIsFrozen) store(v, num, exp_avg_sq);
}

template <typename Convert>
void launch_adam(const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream) {
  const Tensors<Computed<Convert>> all(tensors, num_tensors, options, size_t{kNumThreads} * kThreadNumel<Convert>);
  const auto kernel = options.is_frozen ? adam_kernel<Convert, true> : adam_kernel<Convert, false>;
  launch("adam", stream, all.grid.num_blocks, kernel, all);
}

}  // namespace

void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream) {
  if (dtype == DType::kF64) return launch_adam<Floating<DType::kF64>>(tensors, num_tensors, options, stream);
  for_float_type(
      dtype, [&](auto type) { launch_adam<Floating<decltype(type)::value>>(tensors, num_tensors, options, stream); });
}

}  // namespace bagua::kernels::cuda

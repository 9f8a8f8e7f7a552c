// CUDA form of the reductions; contract: reduce.h. One pass: a thread reads its elements of every source, in the order
// of the sources, before it writes them to any destination, so in place is right.
#include "csrc/kernels/reduce.h"

#include <algorithm>
#include <string>
#include <type_traits>

#include "csrc/kernels/arithmetic/reduce.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"
#include "csrc/kernels/cuda/factor.h"
#include "csrc/kernels/cuda/pointers.h"

namespace bagua::kernels::cuda {
namespace {

// The type that an element is computed in.
struct Plain {
  template <typename T>
  static __device__ __forceinline__ T widen(T value) {
    return value;
  }
  template <typename T>
  static __device__ __forceinline__ T narrow(T value) {
    return value;
  }
};

// The same of bytes that are compared: as bytes ptxas 13.0 keeps them in local memory on sm_100.
template <typename Byte>
struct AsInt {
  static __device__ __forceinline__ int widen(Byte value) { return value; }
  static __device__ __forceinline__ Byte narrow(int value) { return static_cast<Byte>(value); }
};
template <typename T, typename Convert>
using Compared = std::conditional_t<sizeof(T) == 1, AsInt<T>, Convert>;

// The last step of AVG: f64 divides, the others go by way of a factor.
struct Average {
  Factor factor;
  double divisor;

  __device__ __forceinline__ float operator()(float sum) const { return factor.is_one ? sum : factor(sum); }
  __device__ __forceinline__ double operator()(double sum) const { return divisor == 1 ? sum : sum / divisor; }
  template <typename T>
  __device__ __forceinline__ T operator()(T sum) const {
    return sum;  // integers have no AVG
  }
};

template <typename T, typename Convert, typename Operator, int kCapacity>
struct Reduce {
  static constexpr int kNumel = 16 / sizeof(T);
  static constexpr bool kCounts = false;
  using Computed = decltype(Convert::widen(T{}));
  struct Loaded {
    Elements<T, kNumel> result;
  };

  Sources<kCapacity> sources;
  Destinations<kCapacity> destinations;
  Average average;

  // `kIsWhole`: all elements are there, and the sources aligned.
  template <bool kIsWhole>
  __device__ __forceinline__ void load_as(size_t first, int num, Loaded& loaded) const {
    Computed total[kNumel];
    Elements<T, kNumel> next;
    load_known<kIsWhole>(static_cast<const T*>(sources.at[0]) + first, num, next);
#pragma unroll
    for (int i = 0; i < kNumel; ++i) total[i] = Convert::widen(next.element[i]);
#pragma unroll(kIsWhole ? kUnrolled : 1)
    for (int s = 1; s < sources.count; ++s) {
      load_known<kIsWhole>(static_cast<const T*>(sources.at[s]) + first, num, next);
#pragma unroll
      for (int i = 0; i < kNumel; ++i) total[i] = Operator{}(total[i], Convert::widen(next.element[i]));
    }
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      if constexpr (std::is_same_v<Operator, Sum>) total[i] = average(total[i]);
      loaded.result.element[i] = Convert::narrow(total[i]);
    }
  }
  __device__ void load(size_t first, int num, Loaded& loaded) const {
    if (num == kNumel && sources.are_aligned) {
      load_as<true>(first, num, loaded);
    } else {
      load_as<false>(first, num, loaded);
    }
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    for (int d = 0; d < destinations.count; ++d) {
      cuda::store(loaded.result, num, static_cast<T*>(destinations.at[d]) + first);
    }
    return 0;
  }
};

template <int kCapacity>
struct Call {
  const char* name;
  ReduceOp op;
  Sources<kCapacity> sources;
  Destinations<kCapacity> destinations;
  size_t numel;
  Stream stream;
};

template <typename T, typename Convert, typename Operator, int kCapacity>
void launch_reduce(const Call<kCapacity>& call) {
  const int divisor = call.op == ReduceOp::kAvg ? call.sources.count : 1;
  const Average average{Factor(1.0 / divisor), static_cast<double>(divisor)};
  launch_elementwise(call.name, call.stream,
                     Reduce<T, Convert, Operator, kCapacity>{call.sources, call.destinations, average}, call.numel);
}

template <typename T, typename Convert, int kCapacity>
void reduce_as(const Call<kCapacity>& call) {
  switch (call.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return launch_reduce<T, Convert, Sum>(call);
    case ReduceOp::kProduct: return launch_reduce<T, Convert, Product>(call);
    case ReduceOp::kMin: return launch_reduce<T, Compared<T, Convert>, Min>(call);
    case ReduceOp::kMax: return launch_reduce<T, Compared<T, Convert>, Max>(call);
    default: break;
  }
  if constexpr (std::is_integral_v<decltype(Convert::widen(T{}))>) {
    if (call.op == ReduceOp::kBand) return launch_reduce<T, Convert, BitAnd>(call);
    if (call.op == ReduceOp::kBor) return launch_reduce<T, Convert, BitOr>(call);
    if (call.op == ReduceOp::kBxor) return launch_reduce<T, Convert, BitXor>(call);
  }
}

template <int kCapacity>
void reduce(DType dtype, const Call<kCapacity>& call) {
  switch (dtype) {
    case DType::kF32: return reduce_as<float, Plain>(call);
    case DType::kF64: return reduce_as<double, Plain>(call);
    case DType::kF16: return reduce_as<uint16_t, Floating<DType::kF16>>(call);
    case DType::kBF16: return reduce_as<uint16_t, Floating<DType::kBF16>>(call);
    case DType::kI8: return reduce_as<int8_t, Plain>(call);
    case DType::kU8:
    case DType::kBool: return reduce_as<uint8_t, Plain>(call);
    case DType::kI32: return reduce_as<int32_t, Plain>(call);
    case DType::kI64: return reduce_as<int64_t, Plain>(call);
  }
}

template <DType kDType>
struct Scale {
  using Stored = typename Floating<kDType>::Stored;
  static constexpr int kNumel = 16 / sizeof(Stored);
  static constexpr bool kCounts = false;
  using Loaded = Elements<Stored, kNumel>;

  Stored* data;
  Factor factor;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    cuda::load(data + first, num, Stored{0}, loaded);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      loaded.element[i] = Floating<kDType>::narrow(factor(Floating<kDType>::widen(loaded.element[i])));
    }
    cuda::store(loaded, num, data + first);
    return 0;
  }
};

struct ScaleF64 {
  static constexpr int kNumel = 2;
  static constexpr bool kCounts = false;
  using Loaded = Elements<double, kNumel>;

  double* data;
  double factor;

  __device__ void load(size_t first, int num, Loaded& loaded) const { cuda::load(data + first, num, 0.0, loaded); }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) loaded.element[i] *= factor;
    cuda::store(loaded, num, data + first);
    return 0;
  }
};

}  // namespace

void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel, Stream stream) {
  const void* const sources[] = {acc, source};
  void* const destinations[] = {acc};
  // AVG without its division.
  const ReduceOp combines = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  reduce(dtype, Call<kFewPointers>{"reduce_into", combines, {sources, 2}, {destinations, 1}, numel, stream});
}

void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel, Stream stream) {
  if (num_destinations < 1) return;
  for_capacity("reduce_many", std::max(num_sources, num_destinations), [&](auto capacity) {
    reduce(dtype, Call<capacity()>{
                      "reduce_many", op, {sources, num_sources}, {destinations, num_destinations}, numel, stream});
  });
}

void scale(DType dtype, void* data, double factor, size_t numel, Stream stream) {
  if (dtype == DType::kF64) {
    return launch_elementwise("scale", stream, ScaleF64{static_cast<double*>(data), factor}, numel);
  }
  for_float_type(dtype, [=](auto type) {
    using Of = Scale<decltype(type)::value>;
    launch_elementwise("scale", stream, Of{static_cast<typename Of::Stored*>(data), Factor(factor)}, numel);
  });
}

}  // namespace bagua::kernels::cuda

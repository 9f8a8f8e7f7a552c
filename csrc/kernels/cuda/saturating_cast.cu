// CUDA form of the saturating conversion and of its fused forms; contract: saturating_cast.h.
#include "csrc/kernels/saturating_cast.h"

#include "csrc/kernels/arithmetic/saturating_cast.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"
#include "csrc/kernels/cuda/factor.h"
#include "csrc/kernels/cuda/pointers.h"
#include "csrc/kernels/cuda/residual.h"

namespace bagua::kernels::cuda {
namespace {

constexpr int kCodesNumel = 8;  // 16 bytes of codes
using Codes = Elements<uint16_t, kCodesNumel>;

struct Values {
  float value[kCodesNumel];
};

// The codes of the values; returns how many of the first `num` were not finite. Most often none needs a clamp.
template <DType kTo>
__device__ __forceinline__ int encode(const Values& values, int num, Codes& codes) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCodesNumel; ++i) largest = greater_or_nan(largest, absolute(values.value[i]));
  if (largest <= std::bit_cast<float>(largest_of(kTo))) {
    narrow_numbers<kTo>(values.value, codes);
    return 0;
  }
  int num_nonfinite = 0;
#pragma unroll
  for (int i = 0; i < kCodesNumel; ++i) {
    num_nonfinite += i < num && is_nonfinite(values.value[i]);
    codes.element[i] = Floating<kTo>::narrow(clamp_finite(values.value[i], largest_of(kTo)));
  }
  return num_nonfinite;
}

template <DType kFrom, DType kTo>
struct SaturatingCast {
  static constexpr int kNumel = kCodesNumel;
  static constexpr bool kCounts = true;
  using Loaded = Values;

  const void* source;
  uint16_t* destination;
  uint64_t* count;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    load_f32<kFrom, kNumel>(source, first, num, 0.0f, loaded.value);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    Codes codes;
    const int num_nonfinite = encode<kTo>(loaded, num, codes);
    cuda::store(codes, num, destination + first);
    return num_nonfinite;
  }
};

// Of totals that hold the residual.
template <DType kTo>
__device__ __forceinline__ int store_totals(const Values& totals, const Residual& residual, size_t first, int num,
                                            uint16_t* destination) {
  Codes codes;
  const int num_nonfinite = encode<kTo>(totals, num, codes);
  cuda::store(codes, num, destination + first);
  if (residual.out != nullptr) {
    float left[kCodesNumel];
#pragma unroll
    for (int i = 0; i < kCodesNumel; ++i) left[i] = totals.value[i] - Floating<kTo>::number(codes.element[i]);
    store_residual<kCodesNumel>(left, residual, first, num);
  }
  return num_nonfinite;
}

template <DType kFrom, DType kTo>
struct WithResidual {
  static constexpr int kNumel = kCodesNumel;
  static constexpr bool kCounts = true;
  using Loaded = Values;

  const void* source;
  Residual residual;
  uint16_t* destination;
  uint64_t* count;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    load_f32<kFrom, kNumel>(source, first, num, 0.0f, loaded.value);
    add_residual<kNumel>(residual, first, num, loaded.value);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    return store_totals<kTo>(loaded, residual, first, num, destination);
  }
};

template <DType kTo>
struct ReduceSaturating {
  static constexpr int kNumel = kCodesNumel;
  static constexpr bool kCounts = true;
  using Loaded = Values;

  Contributions contributions;
  Factor factor;
  Residual residual;
  uint16_t* destination;
  uint64_t* count;

  template <bool kIsWhole>
  __device__ __forceinline__ void sum(size_t first, int num, float* sums) const {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) sums[i] = 0.0f;
#pragma unroll(kIsWhole ? kUnrolled : 1)
    for (int rank = 0; rank < contributions.count; ++rank) {
      const uint8_t* bytes = contributions.codes + static_cast<size_t>(rank) * contributions.stride;
      const auto* from = reinterpret_cast<const uint16_t*>(bytes) + first;
      Codes codes;
      load_known<kIsWhole>(from, num, codes);
#pragma unroll
      for (int i = 0; i < kNumel; ++i) sums[i] += Floating<kTo>::number(codes.element[i]);
    }
  }
  __device__ void load(size_t first, int num, Loaded& loaded) const {
    if (num == kNumel && is_aligned<16>(contributions.codes) && contributions.stride % 16 == 0) {
      sum<true>(first, num, loaded.value);
    } else {
      sum<false>(first, num, loaded.value);
    }
    factor.scale<kNumel>(loaded.value);
    if (residual.out != nullptr) add_residual<kNumel>(residual, first, num, loaded.value);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    return store_totals<kTo>(loaded, residual, first, num, destination);
  }
};

template <typename Body>
void for_half_type(DType dtype, Body body) {
  if (dtype == DType::kF16) return body(std::integral_constant<DType, DType::kF16>{});
  body(std::integral_constant<DType, DType::kBF16>{});
}

}  // namespace

void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel, uint64_t* num_nonfinite,
                     Stream stream) {
  auto* codes = static_cast<uint16_t*>(destination);
  for_float_type(from, [=](auto from_type) {
    for_half_type(to, [=](auto to_type) {
      using Of = SaturatingCast<decltype(from_type)::value, decltype(to_type)::value>;
      launch_elementwise("saturating_cast", stream, Of{source, codes, num_nonfinite}, numel);
    });
  });
}

void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite, Stream stream) {
  auto* codes = reinterpret_cast<uint16_t*>(bytes);  // at any alignment: cuda/memory.h
  for_float_type(from, [=, &residual](auto from_type) {
    for_half_type(to, [=, &residual](auto to_type) {
      using Of = WithResidual<decltype(from_type)::value, decltype(to_type)::value>;
      launch_elementwise("saturating_cast_with_residual", stream, Of{source, residual, codes, num_nonfinite}, numel);
    });
  });
}

void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite, Stream stream) {
  auto* codes = reinterpret_cast<uint16_t*>(bytes);
  for_half_type(to, [=, &contributions, &residual](auto to_type) {
    using Of = ReduceSaturating<decltype(to_type)::value>;
    launch_elementwise("reduce_saturating_cast", stream,
                       Of{contributions, Factor(factor), residual, codes, num_nonfinite}, numel);
  });
}

}  // namespace bagua::kernels::cuda

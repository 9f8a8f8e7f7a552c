// CUDA form of the codecs fp16 and bf16; contract: half_codec.h.
#include "csrc/kernels/half_codec.h"

#include "csrc/kernels/arithmetic/half_codec.h"
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

// The codes of the values; returns how many of the first `num` are not finite. Most often none.
template <DType kTo>
__device__ __forceinline__ int encode(const Values& values, int num, Codes& codes) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCodesNumel; ++i) largest = greater_or_nan(largest, absolute(values.value[i]));
  if (largest < std::bit_cast<float>(overflow_of(kTo))) {
    narrow_numbers<kTo>(values.value, codes);
    return 0;
  }
  int num_nonfinite = 0;
#pragma unroll
  for (int i = 0; i < kCodesNumel; ++i) {
    num_nonfinite += i < num && narrows_to_nonfinite(values.value[i], overflow_of(kTo));
    codes.element[i] = Floating<kTo>::narrow(with_canonical_nan(values.value[i]));
  }
  return num_nonfinite;
}

template <DType kFrom, DType kTo>
struct HalfEncode {
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

// Stores the codes of totals that hold the residual.
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
struct HalfEncodeWithResidual {
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
struct HalfReduceEncode {
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

constexpr const char* kHalfName = "half";

void half_encode(int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng,
                 uint64_t* num_nonfinite, Stream stream) {
  auto* codes = reinterpret_cast<uint16_t*>(bytes);  // at any alignment: cuda/memory.h
  for_float_type(dtype, [=](auto from) {
    for_half_type(static_cast<DType>(option), [=](auto to) {
      using Of = HalfEncode<decltype(from)::value, decltype(to)::value>;
      launch_elementwise(kHalfName, stream, Of{source, codes, num_nonfinite}, numel);
    });
  });
}

void half_decode(int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  cast(static_cast<DType>(option), bytes, dtype, destination, numel, stream);
}

void half_decode_add(int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  cast_add(static_cast<DType>(option), bytes, accumulator, numel, stream);
}

void half_encode_with_residual(int option, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng, uint64_t* num_nonfinite, Stream stream) {
  auto* codes = reinterpret_cast<uint16_t*>(bytes);
  for_float_type(dtype, [=, &residual](auto from) {
    for_half_type(static_cast<DType>(option), [=, &residual](auto to) {
      using Of = HalfEncodeWithResidual<decltype(from)::value, decltype(to)::value>;
      launch_elementwise(kHalfName, stream, Of{source, residual, codes, num_nonfinite}, numel);
    });
  });
}

void half_reduce_encode(int option, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite, Stream stream) {
  auto* codes = reinterpret_cast<uint16_t*>(bytes);
  for_half_type(static_cast<DType>(option), [=, &contributions, &residual](auto to) {
    using Of = HalfReduceEncode<decltype(to)::value>;
    launch_elementwise(kHalfName, stream, Of{contributions, Factor(factor), residual, codes, num_nonfinite}, numel);
  });
}

}  // namespace

const BlockKernels kHalf = {half_encode, half_decode, half_decode_add, half_encode_with_residual, half_reduce_encode};

}  // namespace bagua::kernels::cuda

// CUDA form of the float conversions; contract: cast.h. All of them are those of arithmetic/half.h but that between f64
// and f32, where the instruction gives every NaN the same bits and the CPU keeps its sign and payload.
#include "csrc/kernels/cast.h"

#include <bit>
#include <type_traits>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"

namespace bagua::kernels::cuda {
namespace {

__device__ __forceinline__ float f64_to_f32(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  constexpr uint64_t kSign = uint64_t{1} << 63, kInf = uint64_t{0x7ff} << 52;
  if ((bits & ~kSign) <= kInf) return static_cast<float>(value);
  const auto sign = static_cast<uint32_t>(bits >> 32 & 0x80000000u);
  return std::bit_cast<float>(sign | kF32Inf | kF32QuietBit | (static_cast<uint32_t>(bits >> 29) & 0x007fffffu));
}

__device__ __forceinline__ double f32_to_f64(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & kF32Abs) <= kF32Inf) return static_cast<double>(value);
  const uint64_t sign = static_cast<uint64_t>(bits & 0x80000000u) << 32;
  const uint64_t payload = static_cast<uint64_t>((bits & 0x007fffffu) | kF32QuietBit) << 29;
  return std::bit_cast<double>(sign | uint64_t{0x7ff} << 52 | payload);
}

template <DType kDType>
using Stored = typename std::conditional_t<
    kDType == DType::kF64, std::type_identity<double>,
    std::type_identity<typename Floating<kDType == DType::kF64 ? DType::kF32 : kDType>::Stored>>::type;

template <DType kFrom, DType kTo>
__device__ __forceinline__ Stored<kTo> convert(Stored<kFrom> value) {
  if constexpr (kFrom == DType::kF64) {
    if constexpr (kTo == DType::kF32) return f64_to_f32(value);
    if constexpr (kTo == DType::kF16) return narrow_f64<10, 15>(value);
    if constexpr (kTo == DType::kBF16) return narrow_f64<7, 127>(value);
  } else if constexpr (kTo == DType::kF64) {
    return f32_to_f64(Floating<kFrom>::widen(value));
  } else {
    return Floating<kTo>::narrow(Floating<kFrom>::widen(value));
  }
}

template <DType kFrom, DType kTo>
struct Cast {
  // 16 bytes of the narrower type.
  static constexpr int kNumel = sizeof(Stored<kFrom>) == 2 || sizeof(Stored<kTo>) == 2 ? 8 : 4;
  static constexpr bool kCounts = false;
  using Loaded = Elements<Stored<kFrom>, kNumel>;

  const Stored<kFrom>* source;
  Stored<kTo>* destination;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    cuda::load(source + first, num, Stored<kFrom>{0}, loaded);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
    Elements<Stored<kTo>, kNumel> converted;
#pragma unroll
    for (int i = 0; i < kNumel; ++i) converted.element[i] = convert<kFrom, kTo>(loaded.element[i]);
    cuda::store(converted, num, destination + first);
    return 0;
  }
};

template <DType kFrom, DType kTo>
void launch_cast(const void* source, void* destination, size_t numel, Stream stream) {
  if constexpr (kFrom != kTo) {
    const Cast<kFrom, kTo> operation{static_cast<const Stored<kFrom>*>(source), static_cast<Stored<kTo>*>(destination)};
    launch_elementwise("cast", stream, operation, numel);
  }
}

template <DType kFrom>
void cast_from(const void* source, DType to, void* destination, size_t numel, Stream stream) {
  switch (to) {
    case DType::kF64: return launch_cast<kFrom, DType::kF64>(source, destination, numel, stream);
    case DType::kF16: return launch_cast<kFrom, DType::kF16>(source, destination, numel, stream);
    case DType::kBF16: return launch_cast<kFrom, DType::kBF16>(source, destination, numel, stream);
    default: return launch_cast<kFrom, DType::kF32>(source, destination, numel, stream);
  }
}

template <DType kFrom>
struct CastAdd {
  static constexpr int kNumel = kFrom == DType::kF32 ? 4 : 8;
  static constexpr bool kCounts = false;
  struct Loaded {
    Elements<Stored<kFrom>, kNumel> addend;
    Elements<float, kNumel> sum;
  };

  const Stored<kFrom>* source;
  float* accumulator;

  __device__ void load(size_t first, int num, Loaded& loaded) const {
    cuda::load(source + first, num, Stored<kFrom>{0}, loaded.addend);
    cuda::load(accumulator + first, num, 0.0f, loaded.sum);
  }
  __device__ int store(size_t first, int num, Loaded& loaded) const {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) loaded.sum.element[i] += Floating<kFrom>::number(loaded.addend.element[i]);
    cuda::store(loaded.sum, num, accumulator + first);
    return 0;
  }
};

}  // namespace

void cast(DType from, const void* source, DType to, void* destination, size_t numel, Stream stream) {
  if (from == to) return launch_copy("cast", stream, destination, source, numel * item_bytes(from));
  if (from == DType::kF64) return cast_from<DType::kF64>(source, to, destination, numel, stream);
  for_float_type(from, [=](auto type) { cast_from<decltype(type)::value>(source, to, destination, numel, stream); });
}

void cast_add(DType from, const void* source, float* accumulator, size_t numel, Stream stream) {
  for_float_type(from, [=](auto type) {
    constexpr DType kFrom = decltype(type)::value;
    launch_elementwise("cast_add", stream, CastAdd<kFrom>{static_cast<const Stored<kFrom>*>(source), accumulator},
                       numel);
  });
}

}  // namespace bagua::kernels::cuda

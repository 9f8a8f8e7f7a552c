// The arithmetic of the small floats (contract and formula: minifloat.h), for the CPU and for CUDA: the steps of a
// block from its norm, and an element's code and value from the steps. No operation has a subnormal result that counts.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/arithmetic/power_of_two.h"
#include "csrc/kernels/minifloat.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::minifloat {

inline constexpr uint32_t kUnscaledNorm = (127u - 80u) << 23;  // 2^-80: from here on s is 1

struct Format {
  int mantissa_bits;
  int bias;          // of the exponent
  uint32_t largest;  // the code of M
  double most;       // M
};

constexpr Format format_of(Minifloat type) {
  switch (type) {
    case Minifloat::kE4M3: return {3, 7, 0x7e, 448};
    case Minifloat::kE5M2: return {2, 15, 0x7b, 57344};
    case Minifloat::kE2M1: return {1, 1, 7, 6};
    default: return {0, 3, 7, 16};
  }
}

// The bit of a code that is the sign.
template <Minifloat kType>
inline constexpr int kSignBit = minifloat_bits(kType) - 1;
// How far f32's mantissa reaches below the format's, and the difference of the exponents where f32 has them.
template <Minifloat kType>
inline constexpr int kShift = 23 - format_of(kType).mantissa_bits;
template <Minifloat kType>
inline constexpr uint32_t kRebias = (127u - static_cast<uint32_t>(format_of(kType).bias)) << 23;
// The bits of the smallest normal number; below it the numbers are as far apart as above.
template <Minifloat kType>
inline constexpr uint32_t kSmallest = kRebias<kType> + (1u << 23);

// The number of a magnitude's code.
template <Minifloat kType>
BAGUA_INLINE float number_of(uint32_t magnitude) {
  const uint32_t bits = magnitude << kShift<kType>;
  const float subnormal = std::bit_cast<float>(bits + kSmallest<kType>) - std::bit_cast<float>(kSmallest<kType>);
  return std::bit_cast<float>(select(bits < (1u << 23), std::bit_cast<uint32_t>(subnormal), bits + kRebias<kType>));
}

// The steps of a block of elements x * s.
struct Steps {
  float units, step;
  uint32_t norm_bits;  // of norm * s
};

template <Minifloat kType>
BAGUA_INLINE Steps steps_of(float norm) {
  constexpr double kMost = format_of(kType).most;
  Steps steps;
  steps.units = norm == 0.0f ? 0.0f : static_cast<float>(kMost / static_cast<double>(norm));
  steps.step = static_cast<float>(static_cast<double>(norm) / kMost);
  steps.norm_bits = std::bit_cast<uint32_t>(norm);
  return steps;
}

template <Minifloat kType>
BAGUA_INLINE uint32_t code_of(float value, const Steps& steps) {
  // A number whose last bit stands for the distance of the smallest numbers: adding it rounds to one of them.
  constexpr uint32_t kRounder = kSmallest<kType> + (static_cast<uint32_t>(kShift<kType>) << 23);
  constexpr uint32_t kHalf = 1u << (kShift<kType> - 1);
  const uint32_t bits = std::bit_cast<uint32_t>(value * steps.units), magnitude = bits & kF32Abs;
  const uint32_t rebiased = magnitude - kRebias<kType>;
  const uint32_t normal = (rebiased + (kHalf - 1) + (rebiased >> kShift<kType> & 1u)) >> kShift<kType>;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kRounder)) - kRounder;
  return select(magnitude < kSmallest<kType>, subnormal, normal) | bits >> 31 << kSignBit<kType>;
}

// `kIsApart`: the norm is not M * step, rounded.
template <Minifloat kType, bool kIsApart>
BAGUA_INLINE float value_of(uint32_t code, const Steps& steps) {
  const uint32_t magnitude = code & ((1u << kSignBit<kType>)-1), sign = code >> kSignBit<kType> << 31;
  const uint32_t product = std::bit_cast<uint32_t>(number_of<kType>(magnitude) * steps.step);
  if constexpr (!kIsApart) return std::bit_cast<float>(product | sign);
  return std::bit_cast<float>(select(magnitude == format_of(kType).largest, steps.norm_bits, product) | sign);
}

}  // namespace bagua::kernels::minifloat

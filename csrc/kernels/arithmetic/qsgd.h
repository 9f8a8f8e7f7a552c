// The arithmetic of the stochastic quantiser (contract and formula: qsgd.h), for the CPU and for CUDA: the steps of a
// block from its norm, and an element's code and value from the steps.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/arithmetic/power_of_two.h"
#include "csrc/kernels/multiversion.h"
#include "csrc/kernels/qsgd.h"

namespace bagua::kernels::qsgd {

inline constexpr float kScaleUnits = 1 << kRandomBits;

constexpr int32_t levels(int bits) { return (1 << (bits - 1)) - 1; }

inline constexpr uint32_t kUnscaledNorm = (127u - 100u) << 23;  // 2^-100: from here on s is 1

// The steps of a block of elements x * s.
struct Steps {
  float units;         // L * 2^15 / (norm * s)
  float step;          // norm * s / L
  uint32_t norm_bits;  // of norm * s
};

BAGUA_INLINE Steps steps_of(float norm, int32_t num_levels) {
  Steps steps;
  steps.units = static_cast<float>(num_levels * static_cast<double>(kScaleUnits) / static_cast<double>(norm));
  steps.step = static_cast<float>(static_cast<double>(norm) / num_levels);
  steps.norm_bits = std::bit_cast<uint32_t>(norm);
  return steps;
}

// The code + L, whose upper bits are zero. Adding 1.5 * 2^23 rounds to the nearest even integer, which then is the low
// part of the sum's bits. The code of a norm is L or -L whatever is drawn, and none needs a clamp: `units` and the
// product are off by 2^-24 each, so the product is at most L * 2^15 (1 + 2^-23) = L * 2^15 + L / 256, which rounds to
// at most L * 2^15, and that of a norm is at least as little less, so it rounds to just that.
template <int kBits>
BAGUA_INLINE uint32_t code_of(float value, uint32_t draw, const Steps& steps) {
  constexpr float kRounder = 0x1.8p23f;
  constexpr uint32_t kRounderBits = std::bit_cast<uint32_t>(kRounder);
  static_assert(kRounderBits % (1 << kRandomBits) == 0);
  const uint32_t fixed = std::bit_cast<uint32_t>(value * steps.units + kRounder);
  return ((fixed + draw) >> kRandomBits) - (kRounderBits >> kRandomBits) + levels(kBits);
}

// `kIsApart`: the norm is not L * step, rounded.
template <int kBits, bool kIsApart>
BAGUA_INLINE float value_of(int32_t code, const Steps& steps) {
  constexpr int32_t kLevels = levels(kBits);
  const float value = static_cast<float>(code) * steps.step;
  if constexpr (!kIsApart) return value;
  const uint32_t extreme = steps.norm_bits | (static_cast<uint32_t>(code) & 0x80000000u);
  const int32_t sign = code >> 31;
  const bool is_extreme = (code ^ sign) - sign == kLevels;
  return std::bit_cast<float>(select(is_extreme, extreme, std::bit_cast<uint32_t>(value)));
}

}  // namespace bagua::kernels::qsgd

// The arithmetic of the min-max quantiser (contract and formula: minmax_uint8.h), for the CPU and for CUDA: the steps
// of a block from its header, and an element's code and value from the steps.
#pragma once

#include <bit>
#include <cstdint>

#include "csrc/kernels/minmax_uint8.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::minmax_uint8 {

struct Header {
  float min, max;
};
static_assert(sizeof(Header) == kMinmaxUint8HeaderBytes);

// An involution between float bits and integers with the same order, -0.0 below 0.0.
BAGUA_INLINE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline constexpr float kRounder = 0x1.8p23f;  // adding it rounds to the nearest even integer

// The names of the contract; unscale is 1 / s.
struct Steps {
  float scale, unscale;
  float step, inverse_step;
  float base, zero_code;
};

BAGUA_INLINE Steps steps_of(Header header) {
  const double range = static_cast<double>(header.max) - static_cast<double>(header.min);
  const bool is_tiny = range > 0.0 && range < 0x1p-100;  // not a constant block, whose numbers may be huge
  const float scale = is_tiny ? 0x1p100f : range >= 0x1p126 ? 0x1p-4f : 1.0f;
  const double scaled_range = range * static_cast<double>(scale);
  Steps steps;
  steps.scale = scale;
  steps.unscale = is_tiny ? 0x1p-100f : range >= 0x1p126 ? 0x1p4f : 1.0f;
  steps.step = static_cast<float>(scaled_range / 255.0);
  steps.inverse_step = range == 0.0 ? 0.0f : static_cast<float>(255.0 / scaled_range);
  const float low = header.min * scale;
  const bool has_zero = header.min <= 0.0f && header.max >= 0.0f;
  steps.base = has_zero ? 0.0f : low;
  steps.zero_code = has_zero ? (kRounder - low * steps.inverse_step) - kRounder : 0.0f;
  return steps;
}

// A word whose low byte is the code, but for what is_above_codes. Min's code is never below 0: z was rounded from the
// same product that min's code is. Codes do not fall where values rise. `kIsScaled`: s is not 1.
inline constexpr uint32_t kRounderBits = std::bit_cast<uint32_t>(kRounder);
static_assert(kRounderBits % 256 == 0);

template <bool kIsScaled>
BAGUA_INLINE uint32_t unclamped_code_word_of(float value, const Steps& steps) {
  if constexpr (kIsScaled) value *= steps.scale;
  const float sum = (value - steps.base) * steps.inverse_step + (kRounder + steps.zero_code);
  return std::bit_cast<uint32_t>(sum);  // the code is the low part of it
}
BAGUA_INLINE bool is_above_codes(uint32_t word) { return word > kRounderBits + 255; }

// The same, clamped. As integers because the compiler may make a branch of a comparison of floats.
template <bool kIsScaled>
BAGUA_INLINE uint32_t code_word_of(float value, const Steps& steps) {
  const uint32_t code = unclamped_code_word_of<kIsScaled>(value, steps);
  return code < kRounderBits + 255 ? code : kRounderBits + 255;
}
template <bool kIsScaled>
BAGUA_INLINE uint8_t code_of(float value, const Steps& steps) {
  return static_cast<uint8_t>(code_word_of<kIsScaled>(value, steps));
}

// `kIsBelow`: code 0 leads below min, before it is clamped; `kIsAbove`: code 255 above max.
template <bool kIsScaled, bool kIsBelow, bool kIsAbove>
BAGUA_INLINE float value_of(uint8_t code, const Steps& steps, Header header) {
  const float low = steps.base - steps.zero_code * steps.step;
  float value = low + static_cast<float>(static_cast<int32_t>(code)) * steps.step;
  if constexpr (kIsScaled) value *= steps.unscale;
  if constexpr (kIsBelow) value = value < header.min ? header.min : value;
  if constexpr (kIsAbove) value = value > header.max ? header.max : value;
  return value;
}

}  // namespace bagua::kernels::minmax_uint8

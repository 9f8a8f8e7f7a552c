// The arithmetic of the quantiser to four centroids (../centroid.h), of a block and of an element, for the CPU and for
// CUDA.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "csrc/kernels/arithmetic/half.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::centroid {

inline constexpr double kStep = 1.5;  // 6 / 4, in units of sigma
inline constexpr int kNumLevels = 4;

// The header of a block, as it is on the wire.
struct Header {
  float mean, sigma;
};

struct Thresholds {
  float below, middle, above;
};

BAGUA_INLINE Thresholds thresholds_of(Header header) {
  const double mean = static_cast<double>(header.mean), step = static_cast<double>(header.sigma) * kStep;
  return {static_cast<float>(mean - step), header.mean, static_cast<float>(mean + step)};
}

BAGUA_INLINE uint32_t code_of(float value, const Thresholds& thresholds) {
  return static_cast<uint32_t>(value > thresholds.below) + static_cast<uint32_t>(value > thresholds.middle) +
         static_cast<uint32_t>(value > thresholds.above);
}

struct Levels {
  float of[kNumLevels];
};

BAGUA_INLINE Levels levels_of(Header header) {
  constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max());
  const double mean = static_cast<double>(header.mean), sigma = static_cast<double>(header.sigma);
  // False for a NaN in either, and for an Inf, which only a damaged message holds.
  const bool is_finite = mean - mean == 0.0 && sigma - sigma == 0.0;
  Levels levels;
  for (int code = 0; code < kNumLevels; ++code) {
    const double level = mean + (code - 1.5) * kStep * sigma;
    const double clamped = level > kLargest ? kLargest : level < -kLargest ? -kLargest : level;
    levels.of[code] = is_finite ? static_cast<float>(clamped) : std::numeric_limits<float>::quiet_NaN();
  }
  return levels;
}

BAGUA_INLINE float value_of(uint32_t code, const Levels& levels) {
  const float lower = (code & 1) != 0 ? levels.of[1] : levels.of[0];
  const float upper = (code & 1) != 0 ? levels.of[3] : levels.of[2];
  return (code & 2) != 0 ? upper : lower;
}

}  // namespace bagua::kernels::centroid

// CPU form of the search for NaN and infinity; contract: nonfinite.h. An exponent of all ones is one of the two.
#include "csrc/kernels/nonfinite.h"

#include <algorithm>
#include <cstdint>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {
namespace {

// Counts stay in lanes of the element's width: fewer than 2^16 of them.
constexpr size_t kLaneNumel = 32768;

template <typename Bits>
struct Bare {
  typedef Bits Type __attribute__((may_alias));  // of a float
};

template <typename Bits, Bits kExponent>
BAGUA_INLINE size_t count_images(const void* data, size_t numel) {
  const auto* image = static_cast<const typename Bare<Bits>::Type*>(data);
  size_t total = 0;
  for (size_t begin = 0; begin < numel; begin += kLaneNumel) {
    const size_t end = std::min(numel, begin + kLaneNumel);
    Bits found = 0;
    for (size_t i = begin; i < end; ++i) {
      found = static_cast<Bits>(found + static_cast<Bits>((image[i] & kExponent) == kExponent));
    }
    total += found;
  }
  return total;
}

BAGUA_MULTIVERSION size_t count_f32(const void* data, size_t numel) {
  return count_images<uint32_t, 0x7f800000u>(data, numel);
}
BAGUA_MULTIVERSION size_t count_f64(const void* data, size_t numel) {
  return count_images<uint64_t, 0x7ff0000000000000u>(data, numel);
}
BAGUA_MULTIVERSION size_t count_f16(const void* data, size_t numel) {
  return count_images<uint16_t, 0x7c00u>(data, numel);
}
BAGUA_MULTIVERSION size_t count_bf16(const void* data, size_t numel) {
  return count_images<uint16_t, 0x7f80u>(data, numel);
}

}  // namespace

size_t count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride) {
  const auto of = dtype == DType::kF32   ? count_f32
                  : dtype == DType::kF64 ? count_f64
                  : dtype == DType::kF16 ? count_f16
                                         : count_bf16;
  if (stride == 1) return of(data, numel);
  size_t total = 0;
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < numel; i += stride) total += of(bytes + i * item_bytes(dtype), 1);
  return total;
}

}  // namespace bagua::kernels::cpu

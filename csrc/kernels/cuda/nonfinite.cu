// CUDA form of the search for NaN and infinity; contract: nonfinite.h. An exponent of all ones is one of the two.
#include "csrc/kernels/nonfinite.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/elementwise.h"

namespace bagua::kernels::cuda {
namespace {

template <typename Bits, Bits kExponent>
struct Count {
  static constexpr int kNumel = 16 / sizeof(Bits);
  static constexpr bool kCounts = true;
  using Loaded = Elements<Bits, kNumel>;

  const Bits* data;
  uint64_t* count;

  __device__ void load(size_t first, int num, Loaded& loaded) const { cuda::load(data + first, num, Bits{0}, loaded); }
  __device__ int store(size_t, int, Loaded& loaded) const {
    int found = 0;
#pragma unroll
    for (int i = 0; i < kNumel; ++i) found += (loaded.element[i] & kExponent) == kExponent;
    return found;
  }
};

// One element of every `stride`: nothing lies side by side.
template <typename Bits, Bits kExponent>
struct CountStrided {
  static constexpr int kNumel = 1;
  static constexpr bool kCounts = true;
  using Loaded = Bits;

  const Bits* data;
  size_t stride;
  uint64_t* count;

  __device__ void load(size_t first, int, Loaded& loaded) const { loaded = data[first * stride]; }
  __device__ int store(size_t, int, Loaded& loaded) const { return (loaded & kExponent) == kExponent; }
};

template <typename Bits, Bits kExponent>
void count_as(const void* data, size_t numel, size_t stride, uint64_t* count, Stream stream) {
  const auto* images = static_cast<const Bits*>(data);
  if (stride == 1) {
    launch_elementwise("count_nonfinite", stream, Count<Bits, kExponent>{images, count}, numel);
  } else {
    launch_elementwise("count_nonfinite", stream, CountStrided<Bits, kExponent>{images, stride, count},
                       ceil_div(numel, stride));
  }
}

}  // namespace

void count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride, uint64_t* count, Stream stream) {
  switch (dtype) {
    case DType::kF64: return count_as<uint64_t, 0x7ff0000000000000u>(data, numel, stride, count, stream);
    case DType::kF16: return count_as<uint16_t, 0x7c00u>(data, numel, stride, count, stream);
    case DType::kBF16: return count_as<uint16_t, 0x7f80u>(data, numel, stride, count, stream);
    default: return count_as<uint32_t, 0x7f800000u>(data, numel, stride, count, stream);
  }
}

}  // namespace bagua::kernels::cuda

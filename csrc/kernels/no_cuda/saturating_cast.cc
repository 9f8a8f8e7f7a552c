// The symbols of cuda/saturating_cast.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void saturating_cast(DType, const void*, DType, void*, size_t, uint64_t*, Stream) { unavailable("saturating_cast"); }

void saturating_cast_with_residual(DType, const void*, const Residual&, DType, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("saturating_cast_with_residual");
}

void reduce_saturating_cast(const Contributions&, double, const Residual&, DType, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("reduce_saturating_cast");
}

}  // namespace bagua::kernels::cuda

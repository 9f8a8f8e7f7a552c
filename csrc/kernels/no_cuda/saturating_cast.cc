// The symbols of cuda/saturating_cast.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void saturating_cast(DType, const void*, DType, void*, size_t, uint64_t*, Stream) { unavailable("saturating_cast"); }

}  // namespace bagua::kernels::cuda

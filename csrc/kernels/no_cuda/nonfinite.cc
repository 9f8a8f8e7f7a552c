// The symbols of cuda/nonfinite.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void count_nonfinite(DType, const void*, size_t, size_t, uint64_t*, Stream) { unavailable("count_nonfinite"); }

}  // namespace bagua::kernels::cuda

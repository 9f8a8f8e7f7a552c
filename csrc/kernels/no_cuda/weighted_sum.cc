// The symbols of cuda/weighted_sum.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void weighted_sum(DType, const void* const*, const double*, int, void*, size_t, Stream) { unavailable("weighted_sum"); }

}  // namespace bagua::kernels::cuda

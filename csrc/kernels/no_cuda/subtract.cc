// The symbols of cuda/subtract.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void subtract(float*, const float*, size_t, Stream) { unavailable("subtract"); }

}  // namespace bagua::kernels::cuda

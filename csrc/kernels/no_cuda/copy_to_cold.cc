// The symbols of cuda/copy_to_cold.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void copy_to_cold(void*, const void*, size_t, Stream) { unavailable("copy_to_cold"); }

}  // namespace bagua::kernels::cuda

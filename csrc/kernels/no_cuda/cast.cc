// The symbols of cuda/cast.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void cast(DType, const void*, DType, void*, size_t, Stream) { unavailable("cast"); }

void cast_add(DType, const void*, float*, size_t, Stream) { unavailable("cast_add"); }

}  // namespace bagua::kernels::cuda

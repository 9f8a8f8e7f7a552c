// The symbols of cuda/adam.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void adam(DType, const AdamTensor*, int, const AdamOptions&, Stream) { unavailable("adam"); }

}  // namespace bagua::kernels::cuda

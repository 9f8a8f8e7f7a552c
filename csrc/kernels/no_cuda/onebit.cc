// The table of cuda/onebit.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kOnebit = kUnavailable<"onebit">;

}  // namespace bagua::kernels::cuda

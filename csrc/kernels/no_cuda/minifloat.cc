// The table of cuda/minifloat.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kMinifloat = kUnavailable<"minifloat">;

}  // namespace bagua::kernels::cuda

// The table of cuda/qsgd.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kQsgd = kUnavailable<"qsgd">;

}  // namespace bagua::kernels::cuda

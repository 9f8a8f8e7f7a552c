// The table of cuda/half_codec.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kHalf = kUnavailable<"half">;

}  // namespace bagua::kernels::cuda

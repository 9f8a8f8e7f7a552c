// The table of cuda/minmax_uint8.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kMinmaxUint8 = kUnavailable<"minmax_uint8">;

}  // namespace bagua::kernels::cuda

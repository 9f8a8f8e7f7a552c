// The table of cuda/topk.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kTopk = kUnavailable<"topk">;

}  // namespace bagua::kernels::cuda

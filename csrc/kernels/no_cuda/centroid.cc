// The table of cuda/centroid.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kCentroid = kUnavailable<"centroid">;

}  // namespace bagua::kernels::cuda

// The table of cuda/topk_chunk.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

const BlockKernels kTopkChunk = kUnavailable<"topk_chunk">;

}  // namespace bagua::kernels::cuda

// The symbols of cuda/copy_segments.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void copy_segments(const CopySegment*, int, Stream) { unavailable("copy_segments"); }

}  // namespace bagua::kernels::cuda

// The symbols of cuda/digest.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void digest(const DigestPiece*, int, uint64_t*, Stream) { unavailable("digest"); }

}  // namespace bagua::kernels::cuda

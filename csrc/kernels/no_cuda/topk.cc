// The symbols of cuda/topk.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void topk_encode(int, DType, const void*, size_t, uint8_t*, uint64_t*, Stream) { unavailable("topk_encode"); }

void topk_decode(int, DType, const uint8_t*, size_t, void*, Stream) { unavailable("topk_decode"); }

void topk_decode_add(int, const uint8_t*, size_t, float*, Stream) { unavailable("topk_decode_add"); }

}  // namespace bagua::kernels::cuda

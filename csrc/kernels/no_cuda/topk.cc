// The symbols of cuda/topk.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void topk_encode(int, DType, const void*, size_t, uint8_t*, uint64_t*, Stream) { unavailable("topk_encode"); }

void topk_decode(int, DType, const uint8_t*, size_t, void*, Stream) { unavailable("topk_decode"); }

void topk_decode_add(int, const uint8_t*, size_t, float*, Stream) { unavailable("topk_decode_add"); }

void topk_encode_with_residual(int, DType, const void*, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("topk_encode_with_residual");
}

void topk_reduce_encode(int, const Contributions&, double, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("topk_reduce_encode");
}

}  // namespace bagua::kernels::cuda

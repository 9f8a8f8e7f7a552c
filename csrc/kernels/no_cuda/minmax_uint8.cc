// The symbols of cuda/minmax_uint8.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void minmax_uint8_encode(DType, const void*, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("minmax_uint8_encode");
}

void minmax_uint8_decode(DType, const uint8_t*, size_t, void*, Stream) { unavailable("minmax_uint8_decode"); }

void minmax_uint8_decode_add(const uint8_t*, size_t, float*, Stream) { unavailable("minmax_uint8_decode_add"); }

void minmax_uint8_encode_with_residual(DType, const void*, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("minmax_uint8_encode_with_residual");
}

void minmax_uint8_reduce_encode(const Contributions&, double, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("minmax_uint8_reduce_encode");
}

}  // namespace bagua::kernels::cuda

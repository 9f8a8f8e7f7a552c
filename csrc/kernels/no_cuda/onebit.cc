// The symbols of cuda/onebit.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void onebit_encode(DType, const void*, size_t, uint8_t*, uint64_t*, Stream) { unavailable("onebit_encode"); }

void onebit_decode(DType, const uint8_t*, size_t, void*, Stream) { unavailable("onebit_decode"); }

void onebit_decode_add(const uint8_t*, size_t, float*, Stream) { unavailable("onebit_decode_add"); }

void onebit_encode_with_residual(DType, const void*, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("onebit_encode_with_residual");
}

void onebit_reduce_encode(const Contributions&, double, const Residual&, size_t, uint8_t*, uint64_t*, Stream) {
  unavailable("onebit_reduce_encode");
}

}  // namespace bagua::kernels::cuda

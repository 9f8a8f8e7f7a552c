// The symbols of cuda/qsgd.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void qsgd_encode(int, DType, const void*, size_t, uint8_t*, CounterRng, uint64_t*, Stream) {
  unavailable("qsgd_encode");
}

void qsgd_decode(int, DType, const uint8_t*, size_t, void*, Stream) { unavailable("qsgd_decode"); }

void qsgd_decode_add(int, const uint8_t*, size_t, float*, Stream) { unavailable("qsgd_decode_add"); }

void qsgd_encode_with_residual(int, DType, const void*, const Residual&, size_t, uint8_t*, CounterRng, uint64_t*,
                               Stream) {
  unavailable("qsgd_encode_with_residual");
}

void qsgd_reduce_encode(int, const Contributions&, double, const Residual&, size_t, uint8_t*, CounterRng, uint64_t*,
                        Stream) {
  unavailable("qsgd_reduce_encode");
}

}  // namespace bagua::kernels::cuda

// The symbols of cuda/reduce.cu in a build without CUDA.
#include "csrc/kernels/backend.h"
#include "csrc/kernels/no_cuda/unavailable.h"

namespace bagua::kernels::cuda {

void reduce_into(ReduceOp, DType, void*, const void*, size_t, Stream) { unavailable("reduce_into"); }

void reduce_many(ReduceOp, DType, const void* const*, int, void* const*, int, size_t, Stream) {
  unavailable("reduce_many");
}

void scale(DType, void*, double, size_t, Stream) { unavailable("scale"); }

}  // namespace bagua::kernels::cuda

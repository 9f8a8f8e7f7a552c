// CUDA form of the copy into cold memory (contract: copy_to_cold.h): the copy engine writes whole lines anyway.
#include "csrc/kernels/copy_to_cold.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {

void copy_to_cold(void* destination, const void* source, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const CurrentDevice device(stream, "copy_to_cold");
  check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)),
        "copy_to_cold", stream);
}

}  // namespace bagua::kernels::cuda

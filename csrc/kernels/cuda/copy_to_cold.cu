// CUDA form of the copy into cold memory (contract: copy_to_cold.h): the copy engine writes whole lines anyway.
#include "csrc/kernels/copy_to_cold.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/launch.h"

namespace bagua::kernels::cuda {

void copy_to_cold(void* destination, const void* source, size_t bytes, Stream stream) {
  launch_copy("copy_to_cold", stream, destination, source, bytes);
}

}  // namespace bagua::kernels::cuda

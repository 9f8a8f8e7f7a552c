// CPU form of the subtraction; contract: subtract.h.
#include "csrc/kernels/subtract.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/multiversion.h"

namespace bagua::kernels::cpu {

BAGUA_MULTIVERSION void subtract(float* __restrict destination, const float* __restrict source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] -= source[i];
}

}  // namespace bagua::kernels::cpu

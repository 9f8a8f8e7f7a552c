// What every kernel of a build without CUDA does when it is given a CUDA stream.
#pragma once

#include <string>

#include "csrc/common/error.h"

namespace bagua::kernels::cuda {

[[noreturn]] inline void unavailable(const char* kernel) {
  throw Error(ErrorKind::kInvalidArgument,
              std::string(kernel) +
                  ": was given a CUDA stream, but this bagua was built without CUDA; move the "
                  "tensors to the CPU or install a build of bagua with CUDA");
}

}  // namespace bagua::kernels::cuda

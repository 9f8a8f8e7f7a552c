// The error of every kernel of a build without CUDA that is given a CUDA stream.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "csrc/common/error.h"
#include "csrc/kernels/block_kernels.h"

namespace bagua::kernels::cuda {

[[noreturn]] inline void unavailable(const char* kernel) {
  throw Error(ErrorKind::kInvalidArgument,
              std::string(kernel) +
                  ": was given a CUDA stream, but this bagua was built without CUDA; move the "
                  "tensors to the CPU or install a build of bagua with CUDA");
}

template <size_t kSize>
struct Literal {
  char text[kSize];
  constexpr Literal(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
};

template <Literal kCodec, typename... Arguments>
void unavailable_kernel(Arguments...) {
  unavailable(kCodec.text);
}

template <Literal kCodec>
constexpr BlockKernels kUnavailable = {unavailable_kernel<kCodec>, unavailable_kernel<kCodec>,
                                       unavailable_kernel<kCodec>, unavailable_kernel<kCodec>,
                                       unavailable_kernel<kCodec>};

}  // namespace bagua::kernels::cuda

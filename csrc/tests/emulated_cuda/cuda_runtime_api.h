// In CUDA the part of cuda_runtime.h that C compilers see.
#pragma once

#include "csrc/tests/emulated_cuda/cuda_runtime.h"

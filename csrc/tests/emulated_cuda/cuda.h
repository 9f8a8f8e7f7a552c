// The driver's types as far as csrc/device/cuda uses them.
#pragma once

using CUdevice = int;
using CUcontext = struct CUctx_st*;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_INVALID_CONTEXT = 201 };

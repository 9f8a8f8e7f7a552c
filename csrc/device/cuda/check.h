// Turns what a call of CUDA returned into an Error: no driver and no GPU are the caller's mistake (InvalidArgument),
// everything else is a failure of the device (Device), with CUDA's own text. The one of a kernel that failed earlier is
// reported by any later call: CUDA's errors are sticky.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

namespace bagua::device::cuda {

// Throws unless `status` is success. `call` is what returned it. Takes the error off the thread, so that no later call
// takes it for his.
void check(cudaError_t status, const std::string& call);

// 13000 -> "13.0"
std::string version_name(int version);

// Whether CUDA cannot be used at all here.
bool is_unavailable(cudaError_t status);

}  // namespace bagua::device::cuda

// CUDA's errors as ours; see check.h.
#include "csrc/device/cuda/check.h"

#include "csrc/common/error.h"

namespace bagua::device::cuda {
namespace {

std::string unavailable(cudaError_t status) {
  const std::string reason = cudaGetErrorString(status);
  if (status == cudaErrorNoDevice) {
    return "CUDA has no GPU: " + reason +
           "; see what nvidia-smi lists and what CUDA_VISIBLE_DEVICES selects, or move the tensors to the CPU";
  }
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return "CUDA cannot be used: " + reason + "; found " +
         (driver == 0 ? std::string("no NVIDIA driver") : "an NVIDIA driver for CUDA " + version_name(driver)) +
         ", expected one for CUDA " + version_name(CUDART_VERSION) +
         " or later; install it, or move the tensors to the CPU";
}

}  // namespace

std::string version_name(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool is_unavailable(cudaError_t status) {
  return status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice || status == cudaErrorStubLibrary ||
         status == cudaErrorSystemDriverMismatch || status == cudaErrorCompatNotSupportedOnDevice;
}

void check(cudaError_t status, const std::string& call) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  if (is_unavailable(status)) throw Error(ErrorKind::kInvalidArgument, unavailable(status));
  if (status == cudaErrorInitializationError) {
    throw Error(ErrorKind::kInvalidArgument,
                call + ": " + cudaGetErrorString(status) +
                    "; a process that was forked after CUDA had been used cannot use it, nor can one that is about to "
                    "end: start processes with 'spawn', or use CUDA only after the fork");
  }
  throw Error(ErrorKind::kDevice,
              call + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                  "); an earlier kernel may be the cause: CUDA_LAUNCH_BLOCKING=1 and compute-sanitizer name it");
}

}  // namespace bagua::device::cuda

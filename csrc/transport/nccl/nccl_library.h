// NcclLibrary: NCCL's functions, of a library that is opened at run time: the one that torch has loaded, where it has
// one, so that a process never holds two.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/transport/nccl/nccl_abi.h"

namespace bagua::nccl {

// "2.27.3"
std::string version_name(int version);

class NcclLibrary {
 public:
  // Without a path the one that is loaded as libnccl.so.2, or the first of that name that the loader finds. Throws
  // InvalidArgument where there is none, or it is too old. It stays loaded until the process ends.
  static std::shared_ptr<const NcclLibrary> open(const std::string& path = "");

  int version() const { return version_; }

#define BAGUA_NCCL_POINTER(name, result, arguments) result(*name) arguments = nullptr;
  BAGUA_NCCL_FUNCTIONS(BAGUA_NCCL_POINTER)
#undef BAGUA_NCCL_POINTER

 private:
  NcclLibrary() = default;

  int version_ = 0;
};

}  // namespace bagua::nccl

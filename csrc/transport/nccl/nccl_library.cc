// Opening NCCL, and what is said where that fails; see nccl_library.h.
#include "csrc/transport/nccl/nccl_library.h"

#include <dlfcn.h>

#include "csrc/common/error.h"

namespace bagua::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

[[noreturn]] void unusable(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument,
              what + "; install nvidia-nccl of version " + version_name(kMinVersion) +
                  " or later (torch for CUDA brings one), or leave the choice to bagua: device memory is then staged "
                  "through the host");
}

void* open_handle(const std::string& path) {
  if (path.empty()) {
    if (void* const loaded = dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return loaded;
  }
  const char* const name = path.empty() ? kName : path.c_str();
  void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) unusable(std::string("NCCL cannot be loaded: ") + dlerror());
  return handle;
}

std::string file_of(const void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kName;
}

}  // namespace

std::string version_name(int version) {
  // Before 2.9 the minor version had one digit less.
  const int thousand = version < 10000 ? 1000 : 10000;
  return std::to_string(version / thousand) + "." + std::to_string(version % thousand / 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<const NcclLibrary> NcclLibrary::open(const std::string& path) {
  void* const handle = open_handle(path);
  auto library = std::shared_ptr<NcclLibrary>(new NcclLibrary);
  const auto find = [&](auto& function, const char* symbol) {
    void* const address = dlsym(handle, symbol);
    if (address != nullptr) function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    return address != nullptr;
  };
  const std::string named = path.empty() ? kName : path;
  if (!find(library->GetVersion, "ncclGetVersion")) unusable(named + " is not NCCL: it has no ncclGetVersion");
  const std::string file = file_of(reinterpret_cast<const void*>(library->GetVersion));
  const Result result = library->GetVersion(&library->version_);
  if (result != kSuccess) unusable(file + " does not tell its version: it reports error " + std::to_string(result));
  // Before its functions: those that an old one lacks are what its version says.
  if (library->version_ < kMinVersion) {
    unusable(file + " is NCCL " + version_name(library->version_) + ", which is too old");
  }
#define BAGUA_NCCL_FIND(name, result, arguments)                                                      \
  if (!find(library->name, "nccl" #name)) {                                                           \
    unusable(file + ", NCCL " + version_name(library->version_) + ", lacks the function nccl" #name); \
  }
  BAGUA_NCCL_FUNCTIONS(BAGUA_NCCL_FIND)
#undef BAGUA_NCCL_FIND
  return library;
}

}  // namespace bagua::nccl

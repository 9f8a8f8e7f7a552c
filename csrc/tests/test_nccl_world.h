// Ranks with an emulated device each and the fake libnccl between them.
#pragma once

#include <dlfcn.h>

#include <sstream>

#include "csrc/tests/fake_nccl/fake_nccl.h"
#include "csrc/tests/test_device_world.h"
#include "csrc/transport/nccl/nccl_transport.h"

namespace bagua::testing {

inline Device own_device(int rank) { return {DeviceKind::kEmulated, rank}; }

// The interface to the library: what it is told, and what it has seen.
class FakeNccl {
 public:
  static FakeNccl& instance() {
    static FakeNccl* const fake = new FakeNccl;
    return *fake;
  }

  void reset() { function<FakeNcclReset>("fake_nccl_reset")(); }
  void set_version(int version) { function<FakeNcclSetVersion>("fake_nccl_set_version")(version); }
  void fail_init(int rank, nccl::Result result) { function<FakeNcclFail>("fake_nccl_fail_init")(rank, result); }
  void fail_async(int rank, nccl::Result result) { function<FakeNcclFail>("fake_nccl_fail_async")(rank, result); }
  void hang(int rank) { function<FakeNcclHang>("fake_nccl_hang")(rank); }
  std::vector<std::string> calls(int rank = -1) { return lines(function<FakeNcclText>("fake_nccl_calls")(rank)); }
  std::string violations() { return function<FakeNcclViolations>("fake_nccl_violations")(); }
  int num_communicators() { return function<FakeNcclCount>("fake_nccl_num_communicators")(); }

  size_t num_calls(const std::string& call) {
    const auto all = calls();
    return static_cast<size_t>(std::count(all.begin(), all.end(), call));
  }

 private:
  FakeNccl() : handle_(dlopen(BAGUA_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
    static const FakeNcclDevice device{
        [] { return emulated().current_device().index; },
        [](int index, void* stream, const char* name, void (*run)(void*), void* argument) {
          try {
            emulated().run({own_device(index), stream}, name, [run, argument] { run(argument); });
            return true;
          } catch (const Error&) {
            return false;
          }
        },
        [](const void* address) -> void* {
          try {
            return emulated().host_address(address);
          } catch (const Error&) {
            return nullptr;
          }
        }};
    function<FakeNcclUseDevice>("fake_nccl_use_device")(&device);
  }

  template <typename Function>
  Function function(const char* name) {
    return reinterpret_cast<Function>(dlsym(handle_, name));
  }
  static std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) found.push_back(line);
    return found;
  }

  void* const handle_;
};

struct NcclWorld {
  Kind kind = kTcp;
  // Settings by rank; the last one is the others' too.
  std::vector<std::string> libraries = {BAGUA_FAKE_NCCL};
  std::vector<DeviceChoice> asked = {DeviceChoice::kNative};
  std::string key = "";  // of the group
};

inline std::vector<std::unique_ptr<Engine>> make_nccl_engines(int size, const NcclWorld& world = {}) {
  const auto of_rank = [](const auto& list, size_t rank) { return list[std::min(rank, list.size() - 1)]; };
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(size, world.kind, 20us, world.key)) {
    const size_t rank = engines.size();
    communicator->set_device_channels([](Channel& host) { return std::make_unique<PinnedChannel>(host); });
    communicator->set_device_transport(
        std::make_shared<nccl::NcclSource>(DeviceKind::kEmulated, of_rank(world.libraries, rank)),
        of_rank(world.asked, rank));
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  }
  return engines;
}

}  // namespace bagua::testing

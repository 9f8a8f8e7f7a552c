// The Python interface of the emulated device beyond torch's own. See ../__init__.py.
#include <chrono>
#include <map>
#include <string>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/common/error.h"
#include "csrc/tests/fake_nccl/fake_nccl.h"
#include "device.h"

namespace py = pybind11;

namespace {

// The device's functions for a fake libnccl.
const FakeNcclDevice fake_nccl_device{
    [] { return emulated::runtime().current_device().index; },
    [](int device, void* stream, const char* name, void (*run)(void*), void* argument) {
      try {
        const bagua::Device there{bagua::DeviceKind::kEmulated, device};
        emulated::runtime().run({there, stream}, name, [run, argument] { run(argument); });
        return true;
      } catch (const bagua::Error&) {
        return false;
      }
    },
    [](const void* address) -> void* {
      try {
        return emulated::runtime().host_address(address);
      } catch (const bagua::Error&) {
        return nullptr;
      }
    }};

}  // namespace

PYBIND11_MODULE(BAGUA_EMULATED_MODULE, m) {
  using emulated::runtime;
  m.attr("num_devices") = emulated::kNumDevices;
  m.def("runtime_address",
        [] { return reinterpret_cast<uintptr_t>(static_cast<bagua::device::Runtime*>(&runtime())); });
  m.def("fake_nccl_device", [] { return reinterpret_cast<uintptr_t>(&fake_nccl_device); });
  m.def("is_in_bad_fork", &emulated::is_in_bad_fork);
  m.def("counters", [] {
    const auto now = runtime().counters();
    py::dict counters;
    counters["launches"] = now.launches;
    counters["bytes_to_device"] = now.bytes_to_device;
    counters["bytes_to_host"] = now.bytes_to_host;
    counters["bytes_on_device"] = now.bytes_on_device;
    counters["live_bytes"] = now.live_bytes;
    counters["pinned_bytes"] = now.pinned_bytes;
    counters["num_streams"] = now.num_streams;
    counters["num_events"] = now.num_events;
    counters["num_host_waits"] = emulated::num_host_waits().load();
    return counters;
  });
  m.def("reset_counters", [] {
    runtime().reset_counters();
    emulated::num_host_waits() = 0;
  });
  m.def("set_delay",
        [](double seconds) { runtime().set_delay(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9))); });
  m.def("limit_memory", [](size_t bytes) { runtime().limit_memory(bytes); });
  m.attr("memory_bytes") = bagua::device::EmulatedRuntime::kMemoryBytes;
  m.def("fail_next_kernel", [](int device) { runtime().fail_next_kernel(device); });
  m.def("reset_errors", [] { runtime().reset_errors(); });
}

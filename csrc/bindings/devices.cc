// The devices that there are. The tests hand over the runtime of the emulated one here: it is not part of the module.
#include <string>
#include <tuple>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/device/runtime.h"

namespace py = pybind11;

namespace bagua {

DeviceKind device_kind_from(const std::string& name) {
  for (int kind = 0; kind < kNumDeviceKinds; ++kind) {
    if (name == device_kind_name(static_cast<DeviceKind>(kind))) return static_cast<DeviceKind>(kind);
  }
  throw Error(ErrorKind::kInvalidArgument, "kind is '" + name + "', expected 'cpu', 'cuda' or 'emulated'");
}

void bind_devices(py::module_& m) {
  py::list kinds;  // by number
  for (int kind = 0; kind < kNumDeviceKinds; ++kind) kinds.append(device_kind_name(static_cast<DeviceKind>(kind)));
  m.attr("device_kinds") = py::tuple(kinds);
  m.def(
      "has_device_runtime", [](const std::string& kind) { return device::has_runtime(device_kind_from(kind)); },
      py::arg("kind"), "Whether bagua was built for devices of this kind; the CPU needs nothing.");
  m.def(
      "num_devices",
      [](const std::string& kind) {
        const DeviceKind asked = device_kind_from(kind);
        if (asked == DeviceKind::kCpu) return 1;
        py::gil_scoped_release release;  // the first call initialises the driver
        return device::has_runtime(asked) ? device::runtime_of({asked, 0}).num_devices() : 0;
      },
      py::arg("kind"),
      "0 without a driver or without a runtime. It initialises CUDA: ask in no process that forks afterwards.");
  m.def(
      "describe_device",
      [](const std::string& kind, int index) {
        const DeviceKind asked = device_kind_from(kind);
        const auto found = device::runtime_of({asked, index}).describe(index);
        return std::make_tuple(found.name, found.memory_bytes, found.architecture);
      },
      py::arg("kind"), py::arg("index"), "Name, bytes of memory, and architecture. Initialises CUDA, too.");
  m.def(
      "device_versions",
      [](const std::string& kind) {
        return device::runtime_of({device_kind_from(kind), 0}).versions();
      },
      py::arg("kind"), "Of the driver and the runtime, in words.");
  m.def(
      "register_device_runtime",
      [](const std::string& kind, uintptr_t address) {
        const DeviceKind given = device_kind_from(kind);
        if (given == DeviceKind::kCpu) {
          throw Error(ErrorKind::kInvalidArgument,
                      "kind is 'cpu', which has no runtime; expected 'cuda' or 'emulated'");
        }
        device::register_runtime(given, static_cast<device::Runtime*>(pointer(address)));
      },
      py::arg("kind"), py::arg("address"),
      "`address` is that of a bagua::device::Runtime of the same headers and compiler, which lives as long as the "
      "process; 0 takes it away. For tests.");
}

}  // namespace bagua

// The extension module bagua._C: the C++ core and, through its C ABI, the Rust core.
#include "csrc/bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled core of bagua. Private: the public interface is the package bagua.";
  m.attr("__version__") = BAGUA_VERSION;
  bagua::bind_errors(m);
  bagua::bind_memory(m);
  bagua::bind_devices(m);
  bagua::bind_codecs(m);
  bagua::bind_adam(m);
  bagua::bind_order(m);
  bagua::bind_topology(m);
  bagua::bind_simulator(m);
  bagua::bind_torch_link(m);
  bagua::bind_work(m);
  bagua::bind_completion_queue(m);
  bagua::bind_events(m);
  bagua::bind_group(m);
}

// One function per file of this folder; module.cc calls them all. The only folder that includes pybind11.
#pragma once

#include <pybind11/pybind11.h>

namespace bagua {

void bind_errors(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_devices(pybind11::module_& m);
void bind_codecs(pybind11::module_& m);
void bind_adam(pybind11::module_& m);
void bind_torch_link(pybind11::module_& m);
void bind_work(pybind11::module_& m);
void bind_completion_queue(pybind11::module_& m);
void bind_events(pybind11::module_& m);
void bind_group(pybind11::module_& m);
void bind_order(pybind11::module_& m);
void bind_topology(pybind11::module_& m);
void bind_simulator(pybind11::module_& m);

}  // namespace bagua

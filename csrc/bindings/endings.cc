// Endings for Python: the queue of bagua/torch_backend/callback_thread.py.
#include "csrc/engine/endings.h"

#include <memory>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/engine/work.h"

namespace py = pybind11;

namespace bagua {

void bind_endings(py::module_& m) {
  py::class_<Endings, std::shared_ptr<Endings>>(m, "Endings")
      .def(py::init<>())
      .def(
          "watch",
          // The operation keeps the queue, not the reverse; no Python object is kept.
          [](std::shared_ptr<Endings> endings, Work& work, uint64_t token) {
            work.add_done_callback([endings = std::move(endings), token] { endings->push(token); });
          },
          py::arg("work"), py::arg("token"), "Puts `token` into the queue when the operation has ended, well or not.")
      .def("push", &Endings::push, py::arg("token"))
      .def("next", &Endings::next, py::call_guard<py::gil_scoped_release>(),
           "The oldest token; waits for one. None once the queue is closed and empty.")
      .def("close", &Endings::close);
}

}  // namespace bagua

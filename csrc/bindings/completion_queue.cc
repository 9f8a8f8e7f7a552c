// CompletionQueue for Python: the queue of bagua/torch_backend/callback_thread.py.
#include "csrc/engine/completion_queue.h"

#include <memory>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/engine/work.h"

namespace py = pybind11;

namespace bagua {

void bind_completion_queue(py::module_& m) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(m, "CompletionQueue")
      .def(py::init<>())
      .def(
          "push_when_done",
          // The operation keeps the queue, not the reverse; no Python object is kept.
          [](std::shared_ptr<CompletionQueue> queue, Work& work, uint64_t token) {
            work.add_done_callback([queue = std::move(queue), token] { queue->push(token); });
          },
          py::arg("work"), py::arg("token"), "Puts `token` into the queue when the operation has ended, well or not.")
      .def(
          "push_when_enqueued",
          [](std::shared_ptr<CompletionQueue> queue, Work& work, uint64_t token) {
            work.add_enqueued_callback([queue = std::move(queue), token] { queue->push(token); });
          },
          py::arg("work"), py::arg("token"),
          "The same as soon as all of an operation on a device has been enqueued there.")
      .def("push", &CompletionQueue::push, py::arg("token"))
      .def("next", &CompletionQueue::next, py::call_guard<py::gil_scoped_release>(),
           "The oldest token; waits for one. None once the queue is closed and empty.")
      .def("close", &CompletionQueue::close);
}

}  // namespace bagua

// Work and the engine's events for Python.
#include "csrc/engine/work.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/callbacks.h"
#include "csrc/bindings/convert.h"
#include "csrc/common/deadline.h"
#include "csrc/common/event_log.h"

namespace bagua {

namespace {

// `wait(limit)`, which says whether what it waits for has come, in slices, so that Ctrl-C works. False when the timeout
// passed first; throws what the operation threw.
template <typename Wait>
bool wait_in_slices(Work& work, double timeout_s, Wait wait) {
  if (!work.is_completed()) {
    refuse_inside_handler();
    refuse_inside_callback();
  }
  const Work::Waiter waiter(work);
  const Deadline deadline = Deadline::after(seconds(timeout_s));
  for (;;) {
    bool has_come;
    {
      py::gil_scoped_release release;
      has_come = wait(std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(100), deadline.remaining()));
    }
    if (has_come) break;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (deadline.expired()) return false;
  }
  free_dropped();
  if (const auto error = work.error()) throw Error(*error);
  return true;
}

}  // namespace

void bind_work(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def_property_readonly("ticket", &Work::ticket)
      .def_property_readonly("nonfinite_blocks", &Work::nonfinite_blocks)
      .def_property_readonly("is_result_finite", &Work::is_result_finite)
      .def_property_readonly("sent",
                             [](const Work& work) -> std::optional<std::pair<uint64_t, uint64_t>> {
                               if (!work.is_completed()) return std::nullopt;
                               return std::pair(work.bytes_sent(), work.network_bytes_sent());
                             })
      .def("is_completed",
           [](const Work& work) {
             const bool is_completed = work.is_completed();
             if (is_completed) free_dropped();
             return is_completed;
           })
      .def("error",
           [](const Work& work) -> py::object {
             if (!work.is_completed()) return py::none();
             const auto error = work.error();
             return error ? to_python(*error) : py::object(py::none());
           })
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            return wait_in_slices(work, timeout_s, [&work](auto limit) { return work.wait_for(limit); });
          },
          py::arg("timeout_s"), "False when the timeout passed first; raises what the operation raised.")
      .def(
          "wait_on_stream",
          [](Work& work, double timeout_s, int kind, int index, uintptr_t handle) {
            const Stream stream = stream_from(kind, index, handle);
            return wait_in_slices(work, timeout_s, [&work, stream](auto limit) {
              if (!work.wait_enqueued_for(limit)) return false;
              work.let_wait(stream);
              work.let_go(stream);
              return true;
            });
          },
          py::arg("timeout_s"), py::arg("kind"), py::arg("index"), py::arg("handle"),
          "Of an operation on a device: what is enqueued on the stream from here on finds the result. Waits only until "
          "all of it has been enqueued; False when the timeout passed first; raises what the operation raised.")
      .def(
          "add_done_callback",
          [](Work& work, py::function callback) { work.add_done_callback(wrap_callback(std::move(callback))); },
          py::arg("callback"),
          "Calls `callback()` once: now when the operation has ended, otherwise on the thread that ends it.");
}

void bind_events(py::module_& m) {
  py::class_<Event>(m, "Event")
      .def_readonly("ticket", &Event::ticket)
      .def_property_readonly("kind",
                             [](const Event& event) {
                               constexpr const char* names[] = {"queued", "operation", "encode",
                                                                "wire",   "decode",    "reduce"};
                               return names[static_cast<size_t>(event.kind)];
                             })
      .def_readonly("waits_for_some", &Event::waits_for_some)
      .def_readonly("begin_ns", &Event::begin_ns)
      .def_readonly("end_ns", &Event::end_ns)
      .def_readonly("bytes", &Event::bytes)
      .def_readonly("bytes_sent", &Event::bytes_sent);
  m.def(
      "record_spans",
      [](int count) {
        static EventLog log;  // to make one takes longer than to fill it
        for (int i = 0; i < count; ++i) EventSpan span(log, EventKind::kEncode, 0);
      },
      py::arg("count"), "Records spans in a log of the process's own, for who wants to know what that takes.");
}

}  // namespace bagua

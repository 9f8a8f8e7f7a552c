// The forwarder's side of a TorchLink, for the threads of bagua/net/torch_transport.py. Every call that waits or copies
// lets go of the GIL.
#include <memory>
#include <vector>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/transport/torch/torch_link.h"

namespace py = pybind11;

namespace bagua {

void bind_torch_link(py::module_& m) {
  std::vector<size_t> sizes;
  for (int size = 0; size < kNumFrameSizes; ++size) sizes.push_back(frame_size_bytes(size));
  m.attr("TORCH_FRAME_SIZES") = py::tuple(py::cast(sizes));
  py::class_<TorchLink, std::shared_ptr<TorchLink>> link_class(m, "TorchLink");
  link_class.attr("NONE") = TorchLink::kNone;
  link_class.attr("ENDED") = TorchLink::kEnded;
  link_class
      .def(
          "take",
          [](TorchLink& link, uintptr_t frame, bool block) {
            py::gil_scoped_release release;
            return link.take(static_cast<uint8_t*>(pointer(frame)), block);
          },
          py::arg("frame"), py::arg("block"),
          "Copies the next frame to `frame`: an index of TORCH_FRAME_SIZES, NONE or ENDED.")
      .def("sent", &TorchLink::sent)
      .def(
          "expect",
          [](TorchLink& link, bool block) {
            py::gil_scoped_release release;
            return link.expect(block);
          },
          py::arg("block"), "The next frame to receive: an index of TORCH_FRAME_SIZES, NONE or ENDED.")
      .def(
          "deliver",
          [](TorchLink& link, uintptr_t frame) {
            py::gil_scoped_release release;
            link.deliver(static_cast<const uint8_t*>(pointer(frame)));
          },
          py::arg("frame"))
      .def("fail",
           [](TorchLink& link, const py::object& exception) {
             const Error cause = from_python(exception);
             py::gil_scoped_release release;
             link.fail(cause);
           })
      .def_property_readonly("peer", &TorchLink::peer)
      .def_property_readonly("has_unsent", &TorchLink::has_unsent);
}

}  // namespace bagua

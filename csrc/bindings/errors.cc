// bagua::Error to the class of bagua/errors.py with the same name, with its attributes rank and operation.
#include <array>
#include <exception>

#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/common/error.h"

namespace py = pybind11;

namespace bagua {
namespace {

constexpr std::array<const char*, 7> kClassNames = {"InvalidArgument", "TransportError", "DeadlineExceeded", "Aborted",
                                                    "RemoteError",     "InternalError",  "DeviceError"};

}  // namespace

py::object to_python(const Error& error) {
  py::object type = py::module_::import("bagua.errors").attr(kClassNames.at(static_cast<size_t>(error.kind())));
  py::object rank = error.rank() < 0 ? py::object(py::none()) : py::object(py::int_(error.rank()));
  py::object operation = error.operation().empty() ? py::object(py::none()) : py::object(py::str(error.operation()));
  return type(error.what(), py::arg("rank") = rank, py::arg("operation") = operation,
              py::arg("ranks") = py::tuple(py::cast(error.ranks())));
}

Error from_python(const py::object& exception) {
  const std::string name = py::str(py::type::of(exception).attr("__name__"));
  ErrorKind kind = ErrorKind::kInternal;
  for (size_t i = 0; i < kClassNames.size(); ++i) {
    if (name == kClassNames[i]) kind = static_cast<ErrorKind>(i);
  }
  py::object rank = py::getattr(exception, "rank", py::none());
  py::object operation = py::getattr(exception, "operation", py::none());
  py::object ranks = py::getattr(exception, "ranks", py::none());
  const Error error(kind, py::str(exception), rank.is_none() ? -1 : rank.cast<int>(),
                    operation.is_none() ? std::string() : operation.cast<std::string>());
  return ranks.is_none() ? error : error.of_ranks(ranks.cast<std::vector<int>>());
}

void bind_errors(py::module_& m) {
  py::list names;
  for (const char* name : kClassNames) names.append(name);
  m.attr("error_classes") = py::tuple(names);
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      py::object exception = to_python(error);
      PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
    }
  });
}

}  // namespace bagua

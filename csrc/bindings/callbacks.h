// Between the core's threads and Python: an operation that runs on the calling thread, callbacks into Python, what must
// not be called from within either, and objects that the core's threads let go of.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <pybind11/pybind11.h>

#include "csrc/common/error.h"
#include "csrc/communicator/communicator.h"

namespace bagua {

namespace py = pybind11;

// An operation that runs on the calling thread. What Python raises in the middle of it and is no BaguaError (Ctrl-C,
// mostly) is put aside here while the operation unwinds, and goes on its way afterwards.
struct InlineCall {
  const int rank;
  std::optional<py::error_already_set> raised;

  [[noreturn]] void interrupt(py::error_already_set&& error) {
    const std::string name = py::str(error.type().attr("__name__"));
    raised.emplace(std::move(error));
    throw Error(ErrorKind::kAborted,
                "rank " + std::to_string(rank) + " was interrupted in the middle of an operation: " + name, rank);
  }
  class Scope;
};
// The one of this thread, if it is in the middle of one.
extern thread_local InlineCall* inline_call;

class InlineCall::Scope {
 public:
  explicit Scope(InlineCall* call) { inline_call = call; }
  ~Scope() { inline_call = nullptr; }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

// Throws where a signal handler that runs in the middle of an operation waits for another one.
void refuse_inside_handler();
// Throws in a callback of an operation, on the thread that ends operations.
void refuse_inside_callback();
// Runs the handlers of signals that have come; what they raise ends the operation of this thread. On threads other than
// Python's main one it does nothing.
void check_signals();

std::function<void()> wrap_callback(py::function function);
Communicator::Connector wrap_connector(py::function function);

// An object that lives until this is let go of, on any thread, and free_dropped() is called. Null for None.
std::shared_ptr<void> kept(py::object object);
// Frees what was let go of. With the GIL; runs finalizers.
void free_dropped();

}  // namespace bagua

// Callbacks into Python while operations run; see callbacks.h.
#include "csrc/bindings/callbacks.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "csrc/bindings/convert.h"

namespace bagua {

thread_local InlineCall* inline_call = nullptr;

namespace {

// Set while a thread that ends operations calls back; what it would wait for, it would have to do itself.
thread_local bool inside_callback = false;

// A list of objects that are no longer needed, which any thread adds to without a lock: one in the middle of that does
// not keep a forked child from freeing them.
struct Kept {
  PyObject* object;
  Kept* next = nullptr;
};
std::atomic<Kept*> first_dropped{nullptr};

void drop(Kept* kept) {
  kept->next = first_dropped.load(std::memory_order_relaxed);
  while (!first_dropped.compare_exchange_weak(kept->next, kept, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

bool is_bagua_error(const py::object& exception) {
  return py::isinstance(exception, py::module_::import("bagua.errors").attr("BaguaError"));
}

// A Python function that C++ keeps: the function object is destroyed under the GIL, on whatever thread.
std::shared_ptr<py::function> hold(py::function function) {
  return {new py::function(std::move(function)), [](py::function* f) {
            py::gil_scoped_acquire acquire;
            delete f;
          }};
}

}  // namespace

// The operation in the middle of which a signal handler runs cannot go on before the handler returns.
void refuse_inside_handler() {
  if (inline_call == nullptr) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "a signal handler waits for an operation, but it runs in the middle of another one on the same thread; let "
      "it set a flag, and look at the flag between operations",
      inline_call->rank);
}

void refuse_inside_callback() {
  if (!inside_callback) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "a callback of an operation starts or waits for an operation, but it runs on the thread that ends them; let "
      "it tell another thread, which goes on from there");
}

void check_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) inline_call->interrupt(py::error_already_set());
}

// Calls Python from the thread that ends the operation. Nothing is there to catch what it raises: sys.unraisablehook.
std::function<void()> wrap_callback(py::function function) {
  const auto held = hold(std::move(function));
  return [held, adder = std::this_thread::get_id()] {
    py::gil_scoped_acquire acquire;
    // On the thread that adds it to an operation that has ended already, it may do what that thread may.
    const bool before = std::exchange(inside_callback, inside_callback || std::this_thread::get_id() != adder);
    try {
      (*held)();
    } catch (py::error_already_set& raised) {
      raised.discard_as_unraisable("a callback of an operation");
    }
    inside_callback = before;
  };
}

std::shared_ptr<void> kept(py::object object) {
  if (object.is_none()) return nullptr;
  auto owned = std::make_unique<Kept>();
  owned->object = object.release().ptr();
  return {owned.release(), [](void* dropped) { drop(static_cast<Kept*>(dropped)); }};
}

void free_dropped() {
  if (first_dropped.load(std::memory_order_relaxed) == nullptr) return;
  for (Kept* dropped = first_dropped.exchange(nullptr, std::memory_order_acquire); dropped != nullptr;) {
    const std::unique_ptr<Kept> owned(dropped);
    dropped = owned->next;
    Py_DECREF(owned->object);
  }
}

// Calls Python from the thread that runs the operation.
Communicator::Connector wrap_connector(py::function function) {
  const auto held = hold(std::move(function));
  return [held](int peer) {
    py::gil_scoped_acquire acquire;
    try {
      (*held)(peer);
    } catch (py::error_already_set& raised) {
      if (inline_call != nullptr && !is_bagua_error(raised.value())) inline_call->interrupt(std::move(raised));
      throw from_python(raised.value());
    }
  };
}

}  // namespace bagua

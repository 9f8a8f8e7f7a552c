// One process group: its mesh, its engine, and the collectives as calls on addresses. bagua/group.py
// keeps the tensors alive and checks shapes and types; nothing here validates what it already did.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/bindings/topology.h"
#include "csrc/codecs/codec.h"
#include "csrc/engine/engine.h"
#include "csrc/engine/hierarchical_all_reduce.h"
#include "csrc/transport/control_link.h"
#include "csrc/transport/local/local_channel.h"
#include "csrc/transport/shm/shm_channel.h"
#include "csrc/transport/tcp/tcp_channel.h"
#include "csrc/transport/torch/torch_channel.h"

namespace py = pybind11;

namespace bagua {
namespace {

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
};
thread_local InlineCall* inline_call = nullptr;

// The operation in the middle of which a signal handler runs cannot go on before the handler returns.
void refuse_inside_handler() {
  if (inline_call == nullptr) return;
  throw Error(
      ErrorKind::kInvalidArgument,
      "a signal handler waits for an operation, but it runs in the middle of another one on the same thread; let "
      "it set a flag, and look at the flag between operations",
      inline_call->rank);
}

// Set while a thread that ends operations calls back; what it would wait for, it would have to do itself.
thread_local bool inside_callback = false;

void refuse_inside_callback() {
  if (!inside_callback) return;
  throw Error(ErrorKind::kInvalidArgument,
              "a callback of an operation (a step behind get_future().then, mostly) starts or waits for an operation, "
              "but it runs on the thread that ends them; wait for the future instead, and go on from there");
}

// Runs the handlers of signals that have come. On threads other than Python's main one it does nothing.
void check_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) inline_call->interrupt(py::error_already_set());
}

bool is_bagua_error(const py::object& exception) {
  return py::isinstance(exception, py::module_::import("bagua.errors").attr("BaguaError"));
}

// For C++ to keep: the function object is destroyed under the GIL, on whatever thread.
std::shared_ptr<py::function> hold(py::function function) {
  return {new py::function(std::move(function)), [](py::function* f) {
            py::gil_scoped_acquire acquire;
            delete f;
          }};
}

// Calls Python from the thread that ends the operation. Nobody is there to catch what it raises: sys.unraisablehook.
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

// Calls Python from the thread that runs the operation.
Mesh::Connector wrap_connector(py::function function) {
  const auto held = hold(std::move(function));
  return [held](int peer, Deadline deadline) {
    py::gil_scoped_acquire acquire;
    try {
      (*held)(peer, std::chrono::duration<double>(deadline.remaining()).count());
    } catch (py::error_already_set& raised) {
      if (inline_call != nullptr && !is_bagua_error(raised.value())) inline_call->interrupt(std::move(raised));
      throw from_python(raised.value());
    }
  };
}

uint8_t codec_id(const std::string& name) {
  const auto names = registered_codecs();  // sorted, so equal on all ranks of one version
  return static_cast<uint8_t>(1 + (std::find(names.begin(), names.end(), name) - names.begin()));
}

class Group {
 public:
  Group(const std::string& name, int rank, int size, double spin_us, std::vector<bool> same_host,
        const std::map<std::string, size_t>& thresholds, py::function connector) {
    collectives::Thresholds chosen;
    for (const auto& [threshold, bytes] : thresholds) chosen.set(threshold, bytes);
    auto mesh = std::make_unique<Mesh>(rank, size, name, std::chrono::microseconds(static_cast<int64_t>(spin_us)));
    mesh->set_same_host(std::move(same_host));
    mesh->set_connector(wrap_connector(std::move(connector)));
    engine_ = std::make_unique<Engine>(std::move(mesh), chosen);
  }
  explicit Group(std::unique_ptr<Mesh> mesh) : engine_(std::make_unique<Engine>(std::move(mesh))) {}
  ~Group() {
    if (engine_->is_inherited()) {  // a forked child leaves its parent's threads and locks alone
      (void)engine_.release();
      return;
    }
    py::gil_scoped_release release;
    engine_.reset();
  }

  Engine& engine() { return *engine_; }
  Mesh& mesh() { return engine_->mesh(); }

  void attach_shm(int peer, int control_fd, int ring_fd, size_t ring_bytes, bool is_dialer, int doorbell_fd) {
    auto control = std::make_shared<ControlLink>(control_fd, peer);
    auto channel = std::make_unique<ShmChannel>(peer, ring_fd, ring_bytes, is_dialer, doorbell_fd, control);
    mesh().attach(peer, std::move(channel), std::move(control));
  }
  void attach_tcp(int peer, int control_fd, const std::vector<int>& data_fds) {
    auto control = std::make_shared<ControlLink>(control_fd, peer);
    mesh().attach(peer, std::make_unique<TcpChannel>(peer, data_fds, mesh().doorbell()), std::move(control));
  }
  // The caller moves the frames of the link that it gets.
  std::shared_ptr<TorchLink> attach_torch(int peer, int control_fd) {
    auto control = std::make_shared<ControlLink>(control_fd, peer);
    auto link = std::make_shared<TorchLink>(peer, mesh().doorbell());
    mesh().attach(peer, std::make_unique<TorchChannel>(link), std::move(control));
    return link;
  }

  // Runs now, on this thread, when `blocking` and the engine is idle; otherwise queues.
  std::shared_ptr<Work> run(const Operation& operation, uint64_t bytes, double timeout_s, bool blocking,
                            Engine::Run run) {
    refuse_inside_callback();
    if (!blocking) {
      py::gil_scoped_release release;
      return engine_->submit(operation, bytes, seconds(timeout_s), std::move(run));
    }
    refuse_inside_handler();
    InlineCall call{mesh().rank(), std::nullopt};
    std::shared_ptr<Work> work;
    {
      py::gil_scoped_release release;
      inline_call = &call;
      work = engine_->run_inline(operation, bytes, seconds(timeout_s), std::move(run), check_signals);
      inline_call = nullptr;
    }
    if (call.raised) throw std::move(*call.raised);
    return work;
  }

 private:
  std::unique_ptr<Engine> engine_;
};

Operation make_operation(OperationKind kind, uint64_t numel, DType dtype, ReduceOp op = ReduceOp::kSum, int root = -1) {
  Operation operation;
  operation.kind = kind;
  operation.reduce_op = op;
  operation.dtype = dtype;
  operation.numel = numel;
  operation.root = root;
  return operation;
}

// Enters the codec into the operation and returns it; null for none.
const Codec* use_codec(Operation& operation, const std::optional<std::string>& codec) {
  if (!codec) return nullptr;
  operation.codec = codec_id(*codec);
  return &get_codec(*codec);
}

uint64_t numel_of(size_t bytes, int dtype_code) { return bytes / item_bytes(dtype_from(dtype_code)); }

std::vector<size_t> in_bytes(std::vector<size_t> splits, DType dtype) {
  for (size_t& split : splits) split *= item_bytes(dtype);
  return splits;
}

Operation make_message(size_t bytes, int dtype, uint32_t tag) {
  Operation operation = make_operation(OperationKind::kPointToPoint, numel_of(bytes, dtype), dtype_from(dtype));
  operation.variant = tag;
  return operation;
}

void bind_work(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def_property_readonly("ticket", &Work::ticket)
      .def_property_readonly("nonfinite_blocks", &Work::nonfinite_blocks)
      .def("is_completed", &Work::is_completed)
      .def("error",
           [](const Work& work) -> py::object {
             if (!work.is_completed()) return py::none();
             const auto error = work.error();
             return error ? to_python(*error) : py::object(py::none());
           })
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            if (!work.is_completed()) {
              refuse_inside_handler();
              refuse_inside_callback();
            }
            // In slices, so that Ctrl-C works.
            const Deadline deadline = Deadline::after(seconds(timeout_s));
            for (;;) {
              bool completed;
              {
                py::gil_scoped_release release;
                completed = work.wait_for(
                    std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(100), deadline.remaining()));
              }
              if (completed) break;
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
              if (deadline.expired()) return false;
            }
            if (const auto error = work.error()) throw Error(*error);
            return true;
          },
          py::arg("timeout_s"), "False when the timeout passed first; raises what the operation raised.")
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
      .def_readonly("begin_ns", &Event::begin_ns)
      .def_readonly("end_ns", &Event::end_ns)
      .def_readonly("bytes", &Event::bytes);
}

void bind_reductions(py::class_<Group>& group) {
  group.def(
      "all_reduce",
      [](Group& g, uintptr_t data, size_t numel, int dtype_code, int op_code, const std::optional<std::string>& codec,
         double timeout_s, bool blocking) {
        const DType dtype = dtype_from(dtype_code);
        const auto op = static_cast<ReduceOp>(op_code);
        Operation operation = make_operation(OperationKind::kAllReduce, numel, dtype, op);
        const Codec* used = use_codec(operation, codec);
        return g.run(operation, numel * item_bytes(dtype), timeout_s, blocking, [=](Context& context) {
          return collectives::all_reduce(context, pointer(data), numel, dtype, op, used);
        });
      },
      py::arg("data"), py::arg("numel"), py::arg("dtype"), py::arg("op"), py::arg("codec"), py::arg("timeout_s"),
      py::arg("blocking"));
  group.def(
      "hierarchical_all_reduce",
      [](Group& g, Group& node, Group* leaders, uintptr_t data, size_t numel, int dtype_code, int op_code,
         const std::optional<std::string>& codec, double timeout_s, bool blocking) {
        const DType dtype = dtype_from(dtype_code);
        const auto op = static_cast<ReduceOp>(op_code);
        Operation operation = make_operation(OperationKind::kAllReduce, numel, dtype, op);
        operation.variant = 1;
        const Codec* used = use_codec(operation, codec);
        const Hierarchy hierarchy{&node.engine(), leaders != nullptr ? &leaders->engine() : nullptr};
        return g.run(
            operation, numel * item_bytes(dtype), timeout_s, blocking,
            hierarchical_all_reduce(hierarchy, pointer(data), numel, dtype, op, used, seconds(timeout_s)));
      },
      py::arg("node"), py::arg("leaders").none(true), py::arg("data"), py::arg("numel"),
      py::arg("dtype"), py::arg("op"), py::arg("codec"), py::arg("timeout_s"), py::arg("blocking"));
  group.def("reduce", [](Group& g, uintptr_t data, size_t numel, int dtype_code, int op_code, int root,
                         double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    const auto op = static_cast<ReduceOp>(op_code);
    return g.run(make_operation(OperationKind::kReduce, numel, dtype, op, root), numel * item_bytes(dtype), timeout_s,
                 blocking, [=](Context& context) -> uint64_t {
                   collectives::reduce(context, pointer(data), numel, dtype, op, root);
                   return 0;
                 });
  });
  group.def("reduce_scatter", [](Group& g, uintptr_t input, uintptr_t output, size_t numel, int dtype_code, int op_code,
                                 const std::optional<std::string>& codec, double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    const auto op = static_cast<ReduceOp>(op_code);
    Operation operation = make_operation(OperationKind::kReduceScatter, numel, dtype, op);
    const Codec* used = use_codec(operation, codec);
    return g.run(operation, numel * item_bytes(dtype), timeout_s, blocking, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_reduce_scatter(context, pointer(input), pointer(output), numel, dtype, op,
                                                      *used);
      }
      collectives::reduce_scatter(context, pointer(input), pointer(output), numel, dtype, op);
      return 0;
    });
  });
  group.def("neighbor_average", [](Group& g, uintptr_t data, size_t numel, int dtype_code, int topology, uint64_t step,
                                   const std::optional<std::string>& codec, double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    Operation operation = make_operation(OperationKind::kNeighborAverage, numel, dtype, ReduceOp::kAvg, topology);
    operation.variant = static_cast<uint32_t>(step);  // the low bits tell different steps apart
    const Codec* used = use_codec(operation, codec);
    const auto neighbors = topology_neighbors(topology, g.mesh().size(), g.mesh().rank(), step);
    return g.run(operation, numel * item_bytes(dtype), timeout_s, blocking, [=](Context& context) {
      return collectives::neighbor_average(context, pointer(data), numel, dtype, neighbors, used);
    });
  });
}

void bind_movements(py::class_<Group>& group) {
  group.def("all_gather", [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype_code,
                             const std::optional<std::string>& codec, double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    const size_t numel = numel_of(bytes, dtype_code);
    Operation operation = make_operation(OperationKind::kAllGather, numel, dtype);
    const Codec* used = use_codec(operation, codec);
    return g.run(operation, bytes, timeout_s, blocking, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_all_gather(context, pointer(input), pointer(output), numel, dtype, *used);
      }
      collectives::all_gather(context, pointer(input), pointer(output), bytes);
      return 0;
    });
  });
  group.def("all_to_all", [](Group& g, uintptr_t input, std::vector<size_t> input_splits, uintptr_t output,
                             std::vector<size_t> output_splits, int dtype_code, const std::optional<std::string>& codec,
                             double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    Operation operation = make_operation(OperationKind::kAllToAll, 0, dtype);
    const Codec* used = use_codec(operation, codec);
    size_t bytes = 0;
    for (size_t split : input_splits) bytes += split * item_bytes(dtype);
    return g.run(operation, bytes, timeout_s, blocking, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_all_to_all(context, pointer(input), input_splits, pointer(output), output_splits,
                                                  dtype, *used);
      }
      collectives::all_to_all(context, pointer(input), in_bytes(input_splits, dtype), pointer(output),
                              in_bytes(output_splits, dtype));
      return 0;
    });
  });
  group.def("broadcast", [](Group& g, uintptr_t data, size_t bytes, int dtype_code, int root,
                            const std::optional<std::string>& codec, double timeout_s, bool blocking) {
    const DType dtype = dtype_from(dtype_code);
    const size_t numel = numel_of(bytes, dtype_code);
    Operation operation = make_operation(OperationKind::kBroadcast, numel, dtype, ReduceOp::kSum, root);
    const Codec* used = use_codec(operation, codec);
    return g.run(operation, bytes, timeout_s, blocking, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_broadcast(context, pointer(data), numel, dtype, root, *used);
      }
      collectives::broadcast(context, pointer(data), bytes, root);
      return 0;
    });
  });
  group.def("gather", [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype, int root,
                         double timeout_s, bool blocking) {
    return g.run(
        make_operation(OperationKind::kGather, numel_of(bytes, dtype), dtype_from(dtype), ReduceOp::kSum, root), bytes,
        timeout_s, blocking, [=](Context& context) -> uint64_t {
          collectives::gather(context, pointer(input), pointer(output), bytes, root);
          return 0;
        });
  });
  group.def("scatter", [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype, int root,
                          double timeout_s, bool blocking) {
    return g.run(
        make_operation(OperationKind::kScatter, numel_of(bytes, dtype), dtype_from(dtype), ReduceOp::kSum, root), bytes,
        timeout_s, blocking, [=](Context& context) -> uint64_t {
          collectives::scatter(context, pointer(input), pointer(output), bytes, root);
          return 0;
        });
  });
  group.def("barrier", [](Group& g, double timeout_s, bool blocking) {
    return g.run(make_operation(OperationKind::kBarrier, 0, DType::kU8), 0, timeout_s, blocking,
                 [](Context& context) -> uint64_t {
                   collectives::barrier(context);
                   return 0;
                 });
  });
  group.def("send", [](Group& g, uintptr_t data, size_t bytes, int dtype, int peer, uint32_t tag, double timeout_s) {
    refuse_inside_callback();
    py::gil_scoped_release release;
    return g.engine().submit_send(peer, pointer(data), bytes, make_message(bytes, dtype, tag), seconds(timeout_s));
  });
  group.def("recv", [](Group& g, uintptr_t data, size_t bytes, int dtype, int peer, uint32_t tag, double timeout_s) {
    refuse_inside_callback();
    py::gil_scoped_release release;
    return g.engine().submit_recv(peer, pointer(data), bytes, make_message(bytes, dtype, tag), seconds(timeout_s));
  });
}

}  // namespace

void bind_group(py::module_& m) {
  bind_work(m);
  bind_events(m);
  m.def(
      "local_world",
      [](const std::string& name, int size, double spin_us) {
        std::vector<std::unique_ptr<Group>> groups;
        for (auto& mesh : make_local_world(size, name, std::chrono::microseconds(static_cast<int64_t>(spin_us)))) {
          groups.push_back(std::make_unique<Group>(std::move(mesh)));
        }
        return groups;
      },
      py::arg("name"), py::arg("size"), py::arg("spin_us"),
      "Connected groups of ranks 0..size-1 that are threads of this process, for tests.");
  m.def("default_thresholds", [] { return collectives::Thresholds{}.by_name(); });
  m.def("shm_segment_bytes", &ShmChannel::segment_bytes, "Bytes of the memfd for a pair of rings of `ring_bytes`.");
  py::class_<Group> group(m, "Group");
  group
      .def(py::init<const std::string&, int, int, double, std::vector<bool>, const std::map<std::string, size_t>&,
                    py::function>(),
           py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("spin_us"), py::arg("same_host"),
           py::arg("thresholds"), py::arg("connector"))
      .def("doorbell_fd", [](Group& g) { return g.mesh().doorbell().fd(); })
      .def("attach_shm", &Group::attach_shm, py::arg("peer"), py::arg("control_fd"), py::arg("ring_fd"),
           py::arg("ring_bytes"), py::arg("is_dialer"), py::arg("doorbell_fd"))
      .def("attach_tcp", &Group::attach_tcp, py::arg("peer"), py::arg("control_fd"), py::arg("data_fds"))
      .def("attach_torch", &Group::attach_torch, py::arg("peer"), py::arg("control_fd"))
      .def("is_attached", [](Group& g, int peer) { return g.mesh().is_attached(peer); })
      .def(
          "has_departed", [](Group& g, int peer) { return g.mesh().has_departed(peer); }, py::arg("peer"))
      .def(
          "is_idle", [](Group& g) { return g.engine().is_idle(); }, "Whether every operation has ended.")
      .def("check", [](Group& g) { g.mesh().throw_if_poisoned(); })
      .def(
          "status",
          [](Group& g) {
            const PeerStatus status = g.mesh().status();
            return py::bytes(reinterpret_cast<const char*>(&status), sizeof status);
          },
          "What this rank is doing, for check_status on another one.")
      .def(
          "check_status",
          [](Group& g, int peer, const std::string& bytes) {
            PeerStatus theirs;
            if (bytes.size() != sizeof theirs) return;  // a peer that has no such group
            std::memcpy(&theirs, bytes.data(), sizeof theirs);
            check_status(theirs, g.mesh().status(), peer);
          },
          py::arg("peer"), py::arg("status"), "Raises InvalidArgument if the peer is in another operation.")
      .def("poison",
           [](Group& g, const py::object& exception) {
             const Error cause = from_python(exception);
             py::gil_scoped_release release;
             g.mesh().poison(cause);
           })
      .def_property_readonly("bytes_sent", [](Group& g) { return g.mesh().bytes_sent(); })
      .def_property_readonly("bytes_received", [](Group& g) { return g.mesh().bytes_received(); })
      .def_property_readonly("workspace_bytes", [](Group& g) { return g.engine().workspace_bytes(); })
      .def("events", [](Group& g, bool clear) { return g.engine().events().take(clear); })
      .def("close", [](Group& g) {
        py::gil_scoped_release release;
        g.engine().close();
      });
  bind_reductions(group);
  bind_movements(group);
}

}  // namespace bagua

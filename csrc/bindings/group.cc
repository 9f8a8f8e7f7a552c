// The class Group for Python: connections, state, and the thread on which its operations run.
// bagua/distributed/process_group.py says what keeps the tensors alive and checks shapes and types; nothing here
// validates what it already did.
#include "csrc/bindings/group.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/callbacks.h"
#include "csrc/bindings/convert.h"
#include "csrc/communicator/control_link.h"
#include "csrc/transport/local/local_channel.h"
#include "csrc/transport/nccl/nccl_library.h"
#include "csrc/transport/nccl/nccl_transport.h"
#include "csrc/transport/pinned/pinned_channel.h"
#include "csrc/transport/shm/shm_channel.h"
#include "csrc/transport/tcp/tcp_channel.h"
#include "csrc/transport/torch/torch_channel.h"

namespace bagua {
namespace {

std::unique_ptr<Channel> over_pinned(Channel& host) { return std::make_unique<PinnedChannel>(host); }

// The source of all groups that are made from here on; changed with the GIL held. The library is opened by the first
// that needs it.
std::shared_ptr<DeviceTransportSource>& nccl_source() {
  static std::shared_ptr<DeviceTransportSource> source = std::make_shared<nccl::NcclSource>();
  return source;
}

collectives::Thresholds thresholds_from(const std::map<std::string, size_t>& changes) {
  collectives::Thresholds thresholds;
  for (const auto& [name, bytes] : changes) thresholds.set(name, bytes);
  return thresholds;
}

// Tells peers that come to a group why it could not be made, and returns the cause.
Error refused(Error cause, const std::string& key, const std::shared_ptr<Process>& process) {
  if (process) process->refuse(key, abort_bytes(cause, {}));
  return cause;
}

}  // namespace

Group::Group(const std::string& name, const std::string& key, int rank, std::vector<int> job_ranks, double spin_us,
             std::vector<bool> same_host, const std::map<std::string, size_t>& thresholds, py::function connector,
             std::shared_ptr<Process> process, const std::string& device_transport) try {
  const int size = static_cast<int>(job_ranks.size());
  const bool is_alone = std::count(same_host.begin(), same_host.end(), true) <= 1;  // on its host, with itself
  const std::chrono::microseconds spin(static_cast<int64_t>(spin_us));
  auto communicator = std::make_unique<Communicator>(rank, size, name, spin, is_alone);
  communicator->set_same_host(std::move(same_host));
  communicator->set_connector(wrap_connector(std::move(connector)));
  communicator->set_device_channels(over_pinned);
  communicator->set_device_transport(nccl_source(), device_choice_from(device_transport));
  communicator->liveness().join_process(process, std::move(job_ranks), key);
  engine_ = std::make_unique<Engine>(std::move(communicator), thresholds_from(thresholds));
} catch (const Error& error) {
  if (error.kind() != ErrorKind::kTransport) throw;
  throw refused(of_rank(error, rank), key, process);
}

Group::Group(std::unique_ptr<Communicator> communicator, const collectives::Thresholds& thresholds)
    : engine_(std::make_unique<Engine>(std::move(communicator), thresholds)) {}

Group::~Group() {
  if (engine_->is_inherited()) {  // a forked child leaves its parent's threads and locks alone
    (void)engine_.release();
    return;
  }
  py::gil_scoped_release release;
  engine_.reset();
}

void Group::attach_shm(int peer, int ring_fd, size_t ring_bytes, bool is_dialer, int doorbell_fd) {
  auto control = communicator().liveness().control(peer);  // which fetches the peer's segments
  if (!control) {
    for (const int fd : {ring_fd, doorbell_fd}) ::close(fd);
    throw Error(ErrorKind::kTransport, "rank " + std::to_string(peer) + " has no link to this rank", peer);
  }
  std::unique_ptr<ShmChannel> channel;
  try {
    channel = std::make_unique<ShmChannel>(peer, ring_fd, ring_bytes, is_dialer, doorbell_fd, std::move(control));
  } catch (const Error& error) {
    throw of_rank(error, communicator().rank());
  }
  communicator().attach(peer, std::move(channel));
}

void Group::attach_tcp(int peer, const std::vector<int>& data_fds) {
  communicator().attach(peer, std::make_unique<TcpChannel>(peer, data_fds, communicator().doorbell()));
}

std::shared_ptr<TorchLink> Group::attach_torch(int peer) {
  auto link = std::make_shared<TorchLink>(peer, communicator().doorbell());
  communicator().attach(peer, std::make_unique<TorchChannel>(link));
  return link;
}

namespace {

// The point that the caller's stream has reached by now.
Engine::Place place_of(const Group::Submission& submission) {
  const auto& choice = std::get<2>(submission);
  if (!choice) return {};
  const auto& [kind, index, handle] = *choice;
  const Stream stream = stream_from(kind, index, handle);
  if (stream.is_cpu()) return {};
  return {stream.device, device::recorded_event(stream)};
}

// Submits with `submit`, which lets go of the GIL. Nothing of Python's runs between that and the keeping.
template <typename Submit>
std::shared_ptr<Work> submit_and_keep(const Group::Submission& submission, Submit submit) {
  std::shared_ptr<Work> work = submit();
  if (!work->is_completed()) work->keep(kept(std::get<3>(submission)), chosen(std::get<2>(submission)));
  free_dropped();
  return work;
}

}  // namespace

std::shared_ptr<Work> Group::run(const Operation& operation, uint64_t bytes, const Submission& submission,
                                 Engine::Run run) {
  refuse_inside_callback();
  const auto timeout = seconds(std::get<0>(submission));
  Engine::Place place = place_of(submission);
  if (!std::get<1>(submission) || !place.device.is_cpu()) {
    return submit_and_keep(submission, [&] {
      py::gil_scoped_release release;
      return engine_->submit(operation, bytes, timeout, std::move(run), std::move(place));
    });
  }
  refuse_inside_handler();
  InlineCall call{communicator().rank(), std::nullopt};
  auto work = submit_and_keep(submission, [&] {
    py::gil_scoped_release release;
    const InlineCall::Scope scope(&call);
    return engine_->run_inline(operation, bytes, timeout, std::move(run), check_signals);
  });
  if (call.raised) throw std::move(*call.raised);
  return work;
}

std::shared_ptr<Work> Group::send(int peer, const void* data, uint64_t bytes, const Operation& operation,
                                  const Submission& submission) {
  refuse_inside_callback();
  Engine::Place place = place_of(submission);
  return submit_and_keep(submission, [&] {
    py::gil_scoped_release release;
    return engine_->submit_send(peer, data, bytes, operation, seconds(std::get<0>(submission)), std::move(place));
  });
}

std::shared_ptr<Work> Group::recv(int peer, void* data, uint64_t bytes, const Operation& operation,
                                  const Submission& submission) {
  refuse_inside_callback();
  Engine::Place place = place_of(submission);
  return submit_and_keep(submission, [&] {
    py::gil_scoped_release release;
    return engine_->submit_recv(peer, data, bytes, operation, seconds(std::get<0>(submission)), std::move(place));
  });
}

void bind_group(py::module_& m) {
  m.def(
      "local_world",
      [](const std::string& name, int size, double spin_us, const std::map<std::string, size_t>& thresholds) {
        std::vector<std::unique_ptr<Group>> groups;
        std::vector<Doorbell*> doorbells;
        for (int rank = 0; rank < size; ++rank) {
          const std::chrono::microseconds spin(static_cast<int64_t>(spin_us));
          groups.push_back(std::make_unique<Group>(std::make_unique<Communicator>(rank, size, name, spin),
                                                   thresholds_from(thresholds)));
          groups.back()->communicator().set_device_channels(over_pinned);
          doorbells.push_back(&groups.back()->communicator().doorbell());
        }
        connect_local(doorbells, [&groups](int rank, int peer, std::unique_ptr<Channel> channel) {
          groups[static_cast<size_t>(rank)]->communicator().attach(peer, std::move(channel), nullptr);
        });
        return groups;
      },
      py::arg("name"), py::arg("size"), py::arg("spin_us"), py::arg("thresholds"),
      "Connected groups of ranks 0..size-1 that are threads of this process, for tests.");
  m.def("default_thresholds", [] { return collectives::Thresholds{}.by_name(); });
  m.def("shm_segment_bytes", &ShmChannel::segment_bytes, "Bytes of the memfd for a pair of rings of `ring_bytes`.");
  m.def(
      "use_nccl_library",
      [](const std::string& path, const std::string& device_kind) {
        nccl_source() = std::make_shared<nccl::NcclSource>(device_kind_from(device_kind), path);
      },
      py::arg("path"), py::arg("device_kind") = "cuda",
      "The NCCL of groups that are made from here on, '' for the one that is loaded; for the tests, which have their "
      "own.");
  m.def(
      "nccl_version", [] { return nccl::version_name(nccl::NcclLibrary::open()->version()); },
      "Of the NCCL that is loaded in this process, or would be. Throws InvalidArgument where there is none that could "
      "be used.");
  py::class_<Process, std::shared_ptr<Process>>(m, "Process")
      .def(py::init([](double heartbeat_timeout_s) {
             return std::make_shared<Process>(
                 std::chrono::milliseconds(static_cast<int64_t>(1000 * heartbeat_timeout_s)));
           }),
           py::arg("heartbeat_timeout_s"))
      .def("attach", &Process::attach, py::arg("job_rank"), py::arg("fd"), py::call_guard<py::gil_scoped_release>(),
           "The authenticated connection to a rank of the job, whose descriptor it owns from here on. Raises "
           "TransportError where there is one.")
      .def("is_linked", &Process::is_linked, py::arg("job_rank"), py::call_guard<py::gil_scoped_release>())
      .def("had_link", &Process::had_link, py::arg("job_rank"), py::call_guard<py::gil_scoped_release>(),
           "Whether there is a link to a rank of the job, or was one.")
      .def("has_failed", &Process::has_failed, py::arg("key"), py::call_guard<py::gil_scoped_release>(),
           "Whether a group was closed after a failure.")
      .def("close", &Process::close, py::call_guard<py::gil_scoped_release>(), "Says goodbye to all ranks.");
  py::class_<Group> group(m, "Group");
  group
      .def(py::init<const std::string&, const std::string&, int, std::vector<int>, double, std::vector<bool>,
                    const std::map<std::string, size_t>&, py::function, std::shared_ptr<Process>, const std::string&>(),
           py::arg("name"), py::arg("key"), py::arg("rank"), py::arg("job_ranks"), py::arg("spin_us"),
           py::arg("same_host"), py::arg("thresholds"), py::arg("connector"), py::arg("process"),
           py::arg("device_transport") = "auto")
      .def_property_readonly(
          "key", [](Group& g) { return g.communicator().liveness().key(); },
          "By which the members' processes know the group: no other one of theirs has it, before or after.")
      .def("doorbell_fd", [](Group& g) { return g.communicator().doorbell().fd(); })
      .def("attach_shm", &Group::attach_shm, py::arg("peer"), py::arg("ring_fd"), py::arg("ring_bytes"),
           py::arg("is_dialer"), py::arg("doorbell_fd"))
      .def("attach_tcp", &Group::attach_tcp, py::arg("peer"), py::arg("data_fds"))
      .def("attach_torch", &Group::attach_torch, py::arg("peer"))
      .def("is_attached", [](Group& g, int peer) { return g.communicator().is_attached(peer); })
      .def(
          "has_departed", [](Group& g, int peer) { return g.communicator().has_departed(peer); }, py::arg("peer"))
      .def(
          "is_idle", [](Group& g) { return g.engine().is_idle(); }, "Whether every operation has ended.")
      .def("check",
           [](Group& g) {
             if (!g.communicator().liveness().is_poisoned()) return;
             py::gil_scoped_release release;
             g.communicator().liveness().throw_if_poisoned();
           })
      .def(
          "note_unreachable",
          [](Group& g, int peer, const std::string& what, bool names_peer) {
            g.communicator().liveness().note_unreachable(peer, what, names_peer);
          },
          py::arg("peer"), py::arg("what"), py::arg("names_peer"),
          "How far the connection to a peer has come, for the error at the deadline, and whether that names the peer.")
      .def(
          "doubt_unlinked",
          [](Group& g, int peer, double silence_s, const std::string& what) {
            const py::gil_scoped_release release;
            g.communicator().liveness().doubt_unlinked(peer, seconds(silence_s), what);
          },
          py::arg("peer"), py::arg("silence_s"), py::arg("what"),
          "There is no way to a peer without a link for so long: asks the others, and fails with `what` or with whom "
          "they do not hear either. To be called again and again.")
      .def_property_readonly("has_failed", [](Group& g) { return g.communicator().liveness().is_poisoned(); })
      .def("poison",
           [](Group& g, const py::object& exception) {
             const Error cause = from_python(exception);
             py::gil_scoped_release release;
             g.communicator().liveness().poison(cause);
           })
      .def_property_readonly(
          "device_path", [](Group& g) { return g.communicator().device_path(); },
          "How collectives on a device move: 'NCCL <version>', or 'staged: ' and why; '' before the first.")
      .def_property_readonly("bytes_sent", [](Group& g) { return g.communicator().bytes_sent(); })
      .def_property_readonly("bytes_received", [](Group& g) { return g.communicator().bytes_received(); })
      .def_property_readonly("workspace_bytes", [](Group& g) { return g.engine().workspace_bytes(); })
      .def("events", [](Group& g, bool clear, bool parts,
                        int64_t after_ns) { return g.engine().events().take(clear, parts, after_ns); })
      .def("kept_since_ns", [](Group& g) { return g.engine().events().kept_since_ns(); })
      .def(
          "abort_pending",
          [](Group& g) {
            {
              py::gil_scoped_release release;
              g.engine().abort_pending();
            }
            free_dropped();
          },
          "Before close: if operations are pending, that is why they and the group fail.")
      .def("close", [](Group& g) {
        {
          py::gil_scoped_release release;
          g.engine().close();
        }
        free_dropped();
      });
  bind_collectives(group);
}

}  // namespace bagua

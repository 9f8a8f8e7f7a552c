// One process group as Python holds it: its communicator and its engine.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>

#include "csrc/bindings/convert.h"
#include "csrc/engine/engine.h"
#include "csrc/transport/torch/torch_link.h"

namespace bagua {

class Group {
 public:
  // `key`: see Communicator::key. `job_ranks`: of the group's members, by their ranks in the group. `device_transport`:
  // "auto", "nccl" or "staged".
  Group(const std::string& name, const std::string& key, int rank, std::vector<int> job_ranks, double spin_us,
        std::vector<bool> same_host, const std::map<std::string, size_t>& thresholds, pybind11::function connector,
        std::shared_ptr<Process> process, const std::string& device_transport);
  Group(std::unique_ptr<Communicator> communicator, const collectives::Thresholds& thresholds);
  ~Group();

  Engine& engine() { return *engine_; }
  Communicator& communicator() { return engine_->communicator(); }

  // These need a link to the peer's process. They own the descriptors from here on.
  void attach_shm(int peer, int ring_fd, size_t ring_bytes, bool is_dialer, int doorbell_fd);
  void attach_tcp(int peer, const std::vector<int>& data_fds);
  // The caller moves the frames of the link that it gets.
  std::shared_ptr<TorchLink> attach_torch(int peer);

  // How an operation is submitted: its timeout in seconds, whether the caller waits for it at once, where its tensors
  // are ready, and what has to live until it has ended. (A caller that is interrupted right behind the submission would
  // let go of that.)
  using Submission = std::tuple<double, bool, StreamChoice, pybind11::object>;

  // Runs now, on this thread, when the caller waits for it, it is the CPU's and the engine is idle; otherwise queues.
  // Needs the GIL.
  std::shared_ptr<Work> run(const Operation& operation, uint64_t bytes, const Submission& submission, Engine::Run run);
  std::shared_ptr<Work> send(int peer, const void* data, uint64_t bytes, const Operation& operation,
                             const Submission& submission);
  std::shared_ptr<Work> recv(int peer, void* data, uint64_t bytes, const Operation& operation,
                             const Submission& submission);

 private:
  std::unique_ptr<Engine> engine_;
};

// Adds the collectives and messages to the class (collectives.cc).
void bind_collectives(pybind11::class_<Group>& group);

}  // namespace bagua

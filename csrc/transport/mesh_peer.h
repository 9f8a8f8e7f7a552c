// What a mesh knows of one peer. Private to mesh.cc, mesh_waiting.cc and mesh_blame.cc.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "csrc/transport/control_link.h"
#include "csrc/transport/mesh.h"

namespace bagua {

struct Mesh::Peer {
  std::atomic<Channel*> channel{nullptr};  // published last; points into `owned`
  std::atomic<bool> departed{false};       // set after why_left
  // Guarded by Mesh::mutex_:
  std::unique_ptr<Channel> owned;
  std::shared_ptr<ControlLink> control;
  std::optional<Error> why_left;                        // what its goodbye said
  std::optional<Deadline::Clock::time_point> asked_at;  // the first question since it has answered
  Deadline::Clock::time_point last_question;
  std::optional<PeerStatus> answer;
  Deadline::Clock::time_point answered_at;
  bool is_news = false;  // the worker has not looked at the answer
};

}  // namespace bagua

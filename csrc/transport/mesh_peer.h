// What a mesh knows of one peer. Private to mesh.cc and mesh_waiting.cc.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "csrc/transport/control_link.h"
#include "csrc/transport/mesh.h"

namespace bagua {

struct Mesh::Peer {
  std::atomic<Channel*> channel{nullptr};  // published last; points into `owned`
  std::atomic<bool> departed{false};
  // Guarded by Mesh::mutex_:
  std::unique_ptr<Channel> owned;
  std::shared_ptr<ControlLink> control;
  std::optional<PeerStatus> answer;
};

}  // namespace bagua

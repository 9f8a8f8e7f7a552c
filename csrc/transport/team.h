// Team: the ranks among whom a collective runs: all of a mesh, or some of them. Collectives see ranks 0..size-1
// of their team; requests, deadlines and errors stay the mesh's and name its ranks.
//
// A value, for the thread that runs the mesh's operation.
#pragma once

#include <algorithm>
#include <cassert>
#include <optional>
#include <vector>

#include "csrc/transport/mesh.h"

namespace bagua {

class Team {
 public:
  explicit Team(Mesh& mesh) : mesh_(mesh), rank_(mesh.rank()), size_(mesh.size()) {}
  // Some of another team: `members` are ranks of it, this one among them, in the same order on all of them.
  Team(const Team& whole, const std::vector<int>& members)
      : mesh_(whole.mesh_),
        rank_(static_cast<int>(std::find(members.begin(), members.end(), whole.rank_) - members.begin())),
        size_(static_cast<int>(members.size())) {
    assert(rank_ < size_ && "a team is made by its members");
    for (const int member : members) members_.push_back(whole.in_mesh(member));
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The mesh's verbs; see mesh.h.
  void post_send(int peer, const void* data, size_t bytes, Request* request) const {
    mesh_.post_send(in_mesh(peer), data, bytes, request);
  }
  void post_recv(int peer, void* data, size_t bytes, Request* request) const {
    mesh_.post_recv(in_mesh(peer), data, bytes, request);
  }
  void wait(Request& request) const { mesh_.wait(request); }
  void send(int peer, const void* data, size_t bytes) const { mesh_.send(in_mesh(peer), data, bytes); }
  void recv(int peer, void* data, size_t bytes) const { mesh_.recv(in_mesh(peer), data, bytes); }
  void send_recv(int to, const void* data, size_t bytes, int from, void* into, size_t into_bytes) const {
    mesh_.send_recv(in_mesh(to), data, bytes, in_mesh(from), into, into_bytes);
  }
  void cancel() const { mesh_.cancel(); }

  // True when every other member can address this rank's shared memory and the reverse.
  bool all_share_memory() const {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && !mesh_.shares_memory(in_mesh(peer))) return false;
    }
    return true;
  }
  std::optional<Address> address_of(const void* data, size_t bytes) const { return mesh_.address_of(data, bytes); }
  void* resolve(int peer, const Address& address, size_t bytes) const {
    return mesh_.resolve(in_mesh(peer), address, bytes);
  }
  void* staging(size_t bytes) const { return mesh_.staging(bytes); }
  void count_moved(uint64_t sent, uint64_t received) const { mesh_.count_moved(sent, received); }

 private:
  int in_mesh(int peer) const { return members_.empty() ? peer : members_[static_cast<size_t>(peer)]; }

  Mesh& mesh_;
  std::vector<int> members_;  // ranks of the mesh; empty: all
  const int rank_;
  const int size_;
};

}  // namespace bagua

// Direct broadcast: ranks of one host, the root's data in shared memory.
//
// The root tells everybody where its data lies, or that it is ordinary memory; the others copy it and say
// that they are done, after which the root may return. 2 steps; B bytes read and written per rank.
#include <cstring>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"

namespace bagua::collectives {
namespace {

struct RootNote {
  Address address;
  uint64_t is_shared = 0;
};

bool serve(const Team& team, const void* data, size_t bytes) {
  RootNote note;
  if (const auto address = team.address_of(data, bytes)) note = {*address, 1};
  const auto size = static_cast<size_t>(team.size());
  PostedRequests requests(team, 2 * size);
  for (int peer = 0; peer < team.size(); ++peer) {
    if (peer == team.rank()) continue;
    requests.send(static_cast<size_t>(peer), peer, &note, sizeof note);
    if (note.is_shared != 0) requests.recv_note(size + static_cast<size_t>(peer), peer);
  }
  requests.wait_all();
  if (note.is_shared != 0) team.count_moved((size - 1) * bytes, 0);
  return note.is_shared != 0;
}

bool fetch(const Team& team, void* data, size_t bytes, int root) {
  RootNote note;
  team.recv(root, &note, sizeof note);
  if (note.is_shared == 0) return false;
  std::memcpy(data, team.resolve(root, note.address, bytes), bytes);
  team.count_moved(0, bytes);
  team.send(root, nullptr, 0);
  return true;
}

}  // namespace

bool direct_broadcast(Context& context, void* data, size_t bytes, int root) {
  if (bytes == 0) return true;
  if (context.team.rank() == root) return serve(context.team, data, bytes);
  return fetch(context.team, data, bytes, root);
}

}  // namespace bagua::collectives

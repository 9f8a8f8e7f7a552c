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

bool serve(Mesh& mesh, const void* data, size_t bytes) {
  RootNote note;
  if (const auto address = mesh.address_of(data, bytes)) note = {*address, 1};
  const auto size = static_cast<size_t>(mesh.size());
  PostedRequests requests(mesh, 2 * size);
  for (int peer = 0; peer < mesh.size(); ++peer) {
    if (peer == mesh.rank()) continue;
    requests.send(static_cast<size_t>(peer), peer, &note, sizeof note);
    if (note.is_shared != 0) requests.recv_note(size + static_cast<size_t>(peer), peer);
  }
  requests.wait_all();
  if (note.is_shared != 0) mesh.count_moved((size - 1) * bytes, 0);
  return note.is_shared != 0;
}

bool fetch(Mesh& mesh, void* data, size_t bytes, int root) {
  RootNote note;
  mesh.recv(root, &note, sizeof note);
  if (note.is_shared == 0) return false;
  std::memcpy(data, mesh.resolve(root, note.address, bytes), bytes);
  mesh.count_moved(0, bytes);
  mesh.send(root, nullptr, 0);
  return true;
}

}  // namespace

bool direct_broadcast(Context& context, void* data, size_t bytes, int root) {
  if (bytes == 0) return true;
  if (context.mesh.rank() == root) return serve(context.mesh, data, bytes);
  return fetch(context.mesh, data, bytes, root);
}

}  // namespace bagua::collectives

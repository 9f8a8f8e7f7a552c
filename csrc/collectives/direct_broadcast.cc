// Direct broadcast: ranks of one host, the root's data in shared memory.
//
// The root tells every rank where its data lies, or that it is ordinary memory; the others copy it and say
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

bool serve(const GroupView& group, const void* data, size_t bytes) {
  RootNote note;
  if (const auto address = group.address_of(data, bytes)) note = {*address, 1};
  const auto size = static_cast<size_t>(group.size());
  PostedRequests requests(group, 2 * size);
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank()) continue;
    requests.send(static_cast<size_t>(peer), peer, &note, sizeof note);
    if (note.is_shared != 0) requests.recv_note(size + static_cast<size_t>(peer), peer);
  }
  requests.wait_all();
  if (note.is_shared != 0) group.count_moved((size - 1) * bytes, 0);
  return note.is_shared != 0;
}

bool fetch(const GroupView& group, void* data, size_t bytes, int root) {
  RootNote note;
  group.recv(root, &note, sizeof note);
  if (note.is_shared == 0) return false;
  std::memcpy(data, group.resolve(root, note.address, bytes), bytes);
  group.count_moved(0, bytes);
  group.send(root, nullptr, 0);
  return true;
}

}  // namespace

bool direct_broadcast(Context& context, void* data, size_t bytes, int root) {
  if (bytes == 0) return true;
  if (context.group.rank() == root) return serve(context.group, data, bytes);
  return fetch(context.group, data, bytes, root);
}

}  // namespace bagua::collectives

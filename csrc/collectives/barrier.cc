// Dissemination barrier: in round s every rank sends a note to rank + 2^s and waits for one from rank - 2^s.
// ceil(log2 n) steps, no bytes. Source: Hensgen, Finkel, Manber, "Two algorithms for barrier
// synchronization", 1988.
#include "csrc/collectives/collectives.h"

namespace bagua::collectives {

void barrier(Context& context) {
  Mesh& mesh = context.mesh;
  const int size = mesh.size();
  for (int distance = 1; distance < size; distance *= 2) {
    const int to = (mesh.rank() + distance) % size;
    const int from = (mesh.rank() + size - distance) % size;
    mesh.send_recv(to, nullptr, 0, from, nullptr, 0);
  }
}

}  // namespace bagua::collectives

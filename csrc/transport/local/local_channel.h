// LocalChannel: ranks as threads of one process, for tests and for `world(n)`.
//
// The two ends of a pair share one mutex-guarded queue of posted sends and receives per direction. Whoever
// posts the second half of a match copies the bytes, under the mutex, and rings both ranks; nothing is
// buffered, so a send is done only when it has been received. A mismatch of stamps or sizes fails both ends.
// An end that withdraws posted requests (cancel after a failure) or is destroyed fails its peer at once.
// Every pointer of the process is addressable, so the direct collectives work on ordinary memory.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "csrc/transport/mesh.h"

namespace bagua {

// Connects meshes[r], rank r of one group, to one another. The doorbells of the meshes are rung until a
// channel is destroyed, which every mesh does before its doorbell goes.
void connect_local(const std::vector<Mesh*>& meshes);

// The connected meshes of ranks 0..size-1 of a new group.
std::vector<std::unique_ptr<Mesh>> make_local_world(int size, const std::string& name, std::chrono::microseconds spin);

}  // namespace bagua

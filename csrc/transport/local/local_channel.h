// LocalChannel: ranks as threads of one process, for tests and for `world(n)`.
//
// The two ends of a pair share one mutex-guarded queue of posted sends and receives per direction. Whoever
// posts the second half of a match copies the bytes, under the mutex, and rings both ranks; nothing is
// buffered, so a send is done only when it has been received. A mismatch of stamps or sizes fails both ends.
// An end that withdraws posted requests (cancel after a failure) or is destroyed fails its peer at once.
// Every pointer of the process is addressable, so the direct collectives work on ordinary memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "csrc/common/doorbell.h"
#include "csrc/transport/transport.h"

namespace bagua {

// Connects ranks 0 .. size - 1, who sleep on `doorbells`, to one another: `attach` gets every rank's channel to every
// peer. A doorbell is rung until the rank's channels are destroyed.
void connect_local(const std::vector<Doorbell*>& doorbells,
                   const std::function<void(int rank, int peer, std::unique_ptr<Channel>)>& attach);

}  // namespace bagua

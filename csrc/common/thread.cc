// Threads that start, or say why not; see thread.h.
#include "csrc/common/thread.h"

#include <cstring>
#include <system_error>
#include <utility>

#include <pthread.h>

#include "csrc/common/error.h"

namespace bagua {

std::thread start_thread(const std::string& name, std::function<void()> body) {
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kTransport,
                "this rank cannot start the thread '" + name + "': " + std::strerror(error.code().value()) +
                    "; raise `ulimit -u` and `ulimit -v`, or the container's limits of processes and memory, or make "
                    "fewer groups");
  }
}

}  // namespace bagua

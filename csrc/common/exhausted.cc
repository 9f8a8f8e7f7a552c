// Threads that start, or say why not; see exhausted.h.
#include "csrc/common/exhausted.h"

#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include <pthread.h>

namespace bagua {
namespace {

thread_local volatile bool is_there = false;

// A library that was loaded by another one gets a thread's part of its variables when the thread first uses one, and
// the process ends where there is no memory for that: so now, and not in the first callback or where something throws.
void take_thread_local_memory() {
  is_there = true;                   // this library's
  (void)std::uncaught_exceptions();  // that of the C++ runtime
}

}  // namespace

std::thread start_thread(const std::string& name, std::function<void()> body) {
  const std::string shown = name.substr(0, 15);  // before there is a thread, which what throws would leave to nobody
  try {
    std::thread thread([body = std::move(body)] {
      take_thread_local_memory();
      body();
    });
    pthread_setname_np(thread.native_handle(), shown.c_str());
    return thread;
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kTransport,
                "this rank cannot start the thread '" + name + "': " + std::strerror(error.code().value()) +
                    "; raise `ulimit -u` and `ulimit -v`, or the container's limits of processes and memory, or make "
                    "fewer groups");
  }
}

}  // namespace bagua

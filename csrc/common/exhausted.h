// What this process has come to the end of, memory or threads, as errors that say what to do about it. Where that is
// noticed nobody knows the rank, which is this one: who does names it (of_rank). What file descriptors are opened for
// says it where they are opened.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "csrc/common/error.h"

namespace bagua {

inline Error out_of_memory(int rank = -1) {
  return Error(ErrorKind::kTransport,
               "this rank has no memory left; raise its memory limit (the container's, or `ulimit -v`), or use less: "
               "smaller tensors and buckets, fewer groups",
               rank);
}

// The same, naming `rank` where it names none.
inline Error of_rank(const Error& error, int rank) {
  return error.rank() >= 0 ? error : Error(error.kind(), error.what(), rank, error.operation());
}

// A thread of that name. The kernel tells no more of a thread that it refuses than that resources have ended: that of
// threads, or the memory for a stack. Throws TransportError.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace bagua

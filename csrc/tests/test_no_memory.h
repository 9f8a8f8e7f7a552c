// Memory and threads that end, for tests of what is left to do then. The test program's operator new is
// test_no_memory.cc's.
#pragma once

#include <cstddef>

#include <pthread.h>

namespace bagua::testing {

// The next allocations of this thread throw bad_alloc, so many of them: 0 for none any more.
void refuse_memory(int num_allocations);

// All that this thread makes while it lives.
class NoMemory {
 public:
  NoMemory() { refuse_memory(1 << 30); }
  ~NoMemory() { refuse_memory(0); }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
};

// While it lives, this process can have no more threads: no address space has room for their stacks.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 47);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace bagua::testing

// Shared segments: memfd memory of this process that the ranks of the same host may map. Anonymous, so
// there is no /dev/shm limit and nothing is left behind after kill -9.
//
// The registry knows which pointers of this process lie in which segment, and hands out descriptors to
// peers that ask (ControlLink). A segment's memory stays valid here until its owner releases it; peers are
// told, and unmap between two of their own operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "csrc/common/fork_guard.h"

namespace bagua {

// Memory that other ranks of this host can map: which segment of its owner, and where in it.
struct Address {
  uint64_t segment = 0;
  uint64_t offset = 0;
};

// Memory of `bytes` zeros that can be mapped by whoever gets the descriptor, and not be resized by anybody. Throws
// TransportError.
Descriptor create_sealed(const char* name, size_t bytes);
// Throws TransportError where a peer that has passed `fd` could take the memory away again, or it has fewer bytes:
// whoever touches what is not there is killed (SIGBUS).
void expect_sealed(int fd, size_t bytes);
// `bytes` of `fd` mapped into this process, readable and writable. Throws TransportError, also as expect_sealed does.
void* map_shared(int fd, size_t bytes);
void unmap_shared(void* data, size_t bytes);

class SegmentRegistry {
 public:
  static SegmentRegistry& instance();  // of this process; a forked child begins with an empty one

  // Creates a zero-filled segment and maps it. Throws TransportError (out of memory or descriptors).
  void* create(size_t bytes);
  // Unmaps, and tells the listeners so that peers let go of it too.
  void release(void* data);

  // An operation begins in which peers may write to a segment, which is not released meanwhile; and it ends. Where it
  // has failed the segment is isolated, once no other operation needs it: what peers write does not come here any more.
  // Its pages become this process's own, at the same addresses and with what they hold, while other threads may read
  // and write them; peers that still map the segment keep the pages that they have. It is found no more, as if it were
  // released. Where no memory is left it stays shared.
  void expose(uint64_t id);
  void conceal(uint64_t id, bool isolates);

  // The registry of memory that peers may map.
  std::optional<Address> find(const void* data, size_t bytes) const;
  struct Handle {
    Descriptor fd;  // a duplicate; empty when the process has no descriptor left
    uint64_t bytes;
  };
  // Returns a descriptor to hand to a peer; nothing when the segment has been released in the meantime.
  std::optional<Handle> duplicate(uint64_t id) const;

  // `on_release(segment)` runs in the thread that releases. Returns a token for unsubscribe.
  uint64_t subscribe(std::function<void(uint64_t)> on_release);
  void unsubscribe(uint64_t token);

 private:
  struct Segment {
    uint64_t id = 0;  // 0: isolated
    Descriptor fd;
    size_t bytes = 0;
    int num_exposures = 0;
    bool is_to_be_isolated = false;
  };
  using Segments = std::map<uintptr_t, Segment>;
  Segments::iterator find_locked(uint64_t id);
  void tell_released(uint64_t id);

  mutable std::mutex mutex_;  // guards segments_, next_id_
  Segments segments_;         // by first byte
  uint64_t next_id_ = 1;
  std::mutex listeners_mutex_;  // guards listeners_ and their running; taken before any other lock
  std::map<uint64_t, std::function<void(uint64_t)>> listeners_;
  uint64_t next_token_ = 1;
};

}  // namespace bagua

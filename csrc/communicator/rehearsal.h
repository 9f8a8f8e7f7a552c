// Rehearsal: an operation that runs on one rank without its peers. What it posts and waits for is written down, with
// the processor time in between, for the simulator (rust_core/src/rehearsed.rs).
//
// A message that is received holds what this rank has sent in its place: the i-th receive of an operation gets the
// bytes of its i-th send, as far as they go, and zeros. So values stay finite, and what ranks compare is equal.
//
// Threads: all but `operation`, which is for any, are called by the one that runs the operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "csrc/transport/transport.h"

namespace bagua {

struct RehearsedStep {
  enum Kind : uint32_t { kSend = 0, kReceive = 1, kWait = 2, kEnd = 3 };
  static constexpr uint64_t kNone = ~uint64_t{0};

  uint32_t kind = kEnd;
  int32_t peer = -1;
  uint64_t bytes = 0;
  uint64_t about = kNone;  // of a message the one in whose place it stands; of a wait the message
  int64_t busy_ns = 0;     // processor time since the step before
};

class Rehearsal {
 public:
  using Steps = std::vector<RehearsedStep>;

  void begin();
  void post(bool is_send, int peer, void* data, size_t bytes, Request* request);
  void wait(Request& request);
  void cancel();
  void end();

  // The steps of the index-th operation, if it has ended.
  Steps operation(size_t index) const;

 private:
  struct Message {
    uint64_t step = 0;
    void* data = nullptr;
    size_t bytes = 0;
  };

  void add(RehearsedStep step);
  void pair();
  static void fill(const Message& receive, const void* data, size_t bytes);

  int64_t busy_until_ns_ = 0;
  Steps steps_;
  std::deque<Message> sends_, receives_;  // without a partner yet
  mutable std::mutex mutex_;              // guards the next
  std::vector<Steps> operations_;
};

}  // namespace bagua

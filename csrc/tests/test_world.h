// run_world(n, fn): ranks as threads, over the local transport unless told otherwise, for tests of everything
// above it.
//
// Each rank gets a Context of its own. The first exception of any rank poisons the other ranks, so that they
// stop waiting at once, and is rethrown. One deadline for the world: if a rank still runs after it, the test
// program ends with a message, because a thread cannot be stopped from outside.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "csrc/collectives/collectives.h"
#include "csrc/transport/local/local_channel.h"

namespace bagua::testing {

using namespace std::chrono_literals;

// The connected communicators of ranks 0..size-1.
using MakeCommunicators = std::function<std::vector<std::unique_ptr<Communicator>>(int size)>;

// Ranks as threads of this process.
inline std::vector<std::unique_ptr<Communicator>> make_local_world(int size, std::chrono::microseconds spin) {
  std::vector<std::unique_ptr<Communicator>> world;
  std::vector<Doorbell*> doorbells;
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(std::make_unique<Communicator>(rank, size, "test", spin));
    doorbells.push_back(&world.back()->doorbell());
  }
  connect_local(doorbells, [&world](int rank, int peer, std::unique_ptr<Channel> channel) {
    world[static_cast<size_t>(rank)]->attach(peer, std::move(channel), nullptr);
  });
  return world;
}

// A rank that spins for long keeps the core from others, as the ranks are more than the cores.
inline std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size) {
  return make_local_world(size, 10us);
}

struct WorldOptions {
  MakeCommunicators make_communicators = make_local_communicators;
  std::chrono::milliseconds operation_timeout = 60s;
  std::chrono::seconds world_timeout = 300s;
  // After a failure: tell the others (true), or let every rank find out by itself.
  bool spread_failure = true;
};

// One rank of a running world.
struct Rank {
  Communicator& communicator;
  Workspace workspace;
  EventLog events;
  collectives::Thresholds thresholds;
  Context context{GroupView(communicator), workspace, workspace, events, Stream{}, thresholds};
  uint32_t sequence = 0;
  std::chrono::milliseconds operation_timeout;
};

// The rank that the calling thread runs.
inline thread_local Rank* current_rank = nullptr;

inline Operation operation(OperationKind kind, DType dtype = DType::kU8, size_t numel = 0, ReduceOp op = ReduceOp::kSum,
                           int root = -1) {
  Operation result;
  result.kind = kind;
  result.dtype = dtype;
  result.numel = numel;
  result.reduce_op = op;
  result.root = root;
  return result;
}

// Runs one collective the way the engine does: begin, call, end; after a failure cancel.
template <typename Call>
auto perform(Operation what, Call call) {
  Rank& rank = *current_rank;
  what.sequence = ++rank.sequence;
  rank.communicator.begin(what, Deadline::after(rank.operation_timeout));
  struct Ending {
    Communicator& communicator;
    int exceptions = std::uncaught_exceptions();
    ~Ending() {
      if (std::uncaught_exceptions() > exceptions) communicator.cancel();
      communicator.end();
    }
  } ending{rank.communicator};
  return call();
}

class World {
 public:
  using RankFunction = std::function<void(Context&, int)>;

  World(int size, RankFunction function, WorldOptions options)
      : options_(options), function_(std::move(function)), communicators_(options.make_communicators(size)) {}

  // The exceptions of the ranks, null where a rank succeeded; first_failed() is the rank that failed first.
  std::vector<std::exception_ptr> run() {
    failures_.resize(communicators_.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < communicators_.size(); ++r) threads.emplace_back([this, r] { run_rank(r); });
    {
      std::unique_lock lock(mutex_);
      if (!finished_.wait_for(lock, options_.world_timeout,
                              [this] { return num_finished_ == communicators_.size(); })) {
        std::fprintf(stderr, "%zu of %zu ranks still run after the world's deadline\n",
                     communicators_.size() - num_finished_, communicators_.size());
        std::abort();
      }
    }
    for (std::thread& thread : threads) thread.join();
    return failures_;
  }
  int first_failed() const { return first_failed_; }

 private:
  void run_rank(size_t r) {
    Rank rank{.communicator = *communicators_[r],
              .workspace = {},
              .events = {},
              .thresholds = {},
              .operation_timeout = options_.operation_timeout};
    current_rank = &rank;
    try {
      function_(rank.context, static_cast<int>(r));
    } catch (...) {
      failed(r, std::current_exception());
    }
    current_rank = nullptr;
    std::lock_guard lock(mutex_);
    ++num_finished_;
    finished_.notify_all();
  }

  void failed(size_t r, std::exception_ptr failure) {
    {
      std::lock_guard lock(mutex_);
      failures_[r] = failure;
      if (first_failed_ < 0) first_failed_ = static_cast<int>(r);
    }
    if (!options_.spread_failure) return;
    for (auto& communicator : communicators_)
      communicator->liveness().poison(Error(ErrorKind::kAborted, "rank " + std::to_string(r) + " failed"));
  }

  const WorldOptions options_;
  const RankFunction function_;
  std::vector<std::unique_ptr<Communicator>>
      communicators_;  // outlive the threads: peers use each other's staging memory
  std::mutex mutex_;   // guards the four below
  std::condition_variable finished_;
  size_t num_finished_ = 0;
  int first_failed_ = -1;
  std::vector<std::exception_ptr> failures_;
};

inline void run_world(int size, World::RankFunction function, WorldOptions options = {}) {
  World world(size, std::move(function), options);
  const auto failures = world.run();
  if (world.first_failed() >= 0) std::rethrow_exception(failures[static_cast<size_t>(world.first_failed())]);
}

// Fails the calling rank, and with it the world, with a message.
inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

}  // namespace bagua::testing

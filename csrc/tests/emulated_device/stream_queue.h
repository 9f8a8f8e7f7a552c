// One stream of an emulated device: commands in order on a thread of its own. A late command begins after a random
// while, often none, so that who needs an event and has none sees wrong values. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace bagua::device {

class StreamQueue {
 public:
  enum class Start { kNow, kLate };

  // `name` is the thread's. Late is up to `max_delay_ns`, which outlives the queue and may change.
  StreamQueue(std::string name, uint64_t seed, const std::atomic<int64_t>& max_delay_ns);
  // Executes what is enqueued and joins the thread.
  ~StreamQueue();
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  // Commands do not throw.
  void enqueue(std::function<void()> command, Start start);
  bool is_idle();
  void synchronize();
  // The thread ends once all is executed; nothing may be enqueued from here on.
  void close();
  // The same for who waits for nothing any more: the queue goes with its thread.
  static void abandon(std::shared_ptr<StreamQueue> queue);

 private:
  struct Command {
    std::function<void()> execute;
    Start start;
  };

  void execute_all();
  void sleep_for_a_while();

  const std::string name_;
  const std::atomic<int64_t>& max_delay_ns_;
  std::mt19937_64 random_;  // of the thread alone

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::deque<Command> commands_;
  bool is_executing_ = false;
  bool is_closed_ = false;
  std::thread thread_;                 // starts with the first command: most default streams are never used
  std::shared_ptr<StreamQueue> self_;  // of an abandoned one
};

}  // namespace bagua::device

// Callbacks of a Work: once, on the thread that ends the operation, after a failure too; and the queue of queue.
#include <atomic>
#include <thread>

#include "csrc/engine/completion_queue.h"
#include "csrc/engine/engine.h"
#include "csrc/tests/test_device_world.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

using namespace std::chrono_literals;

TEST(WorkCallbacks, AreCalledOnceByTheThreadThatCompletes) {
  Work work(1);
  std::vector<std::thread::id> called;
  work.add_done_callback([&] {
    EXPECT_TRUE(work.is_completed());
    called.push_back(std::this_thread::get_id());
  });
  EXPECT_TRUE(called.empty());
  std::thread worker([&] { work.complete(0); });
  const auto id = worker.get_id();
  worker.join();
  ASSERT_EQ(called, std::vector{id});
  work.add_done_callback([&] { called.push_back(std::this_thread::get_id()); });
  EXPECT_EQ(called, (std::vector{id, std::this_thread::get_id()}));
}

TEST(Work, KeepsWhatItNeedsUntilItHasEnded) {
  for (const bool fails : {false, true}) {
    auto work = std::make_shared<Work>(1);
    auto memory = std::make_shared<int>(3);
    work->keep(memory, {});
    std::weak_ptr<int> kept = std::exchange(memory, nullptr);
    EXPECT_FALSE(kept.expired());
    if (fails) {
      work->fail(Error(ErrorKind::kAborted, "on purpose"));
    } else {
      work->complete(0);
    }
    EXPECT_TRUE(kept.expired());
    memory = std::make_shared<int>(4);
    work->keep(memory, {});
    EXPECT_EQ(memory.use_count(), 1) << "nobody would let go of it before the handle";
  }
}

TEST(Work, KeepsWhatALateDeviceUsesThoughItHasFailed) {
  Work work(1);
  const auto memory = std::make_shared<int>(3);
  work.keep(memory, {});
  work.fail(Error(ErrorKind::kAborted, "on purpose"), true);
  EXPECT_EQ(memory.use_count(), 2);
  work.keep(memory, {});  // by who has submitted it, late
  EXPECT_EQ(memory.use_count(), 2);
  work.release();
  EXPECT_EQ(memory.use_count(), 1);
  work.keep(memory, {});
  EXPECT_EQ(memory.use_count(), 1);
}

TEST(Work, LetsGoOfMemoryThatIsUsedNextBehindIt) {
  const Stream stream{{DeviceKind::kEmulated, 0}}, other{{DeviceKind::kEmulated, 1}};
  Work work(1);
  const auto memory = std::make_shared<int>(3);
  work.keep(memory, stream);
  work.let_go(other);
  EXPECT_EQ(memory.use_count(), 2) << "what is enqueued there may come first";
  work.let_go(stream);
  EXPECT_EQ(memory.use_count(), 1);
}

TEST(WorkCallbacks, SeeTheFailureAndMayAddMore) {
  Work work(1);
  int calls = 0;
  work.add_done_callback([&] {
    EXPECT_EQ(work.error()->kind(), ErrorKind::kAborted);
    work.add_done_callback([&] { ++calls; });
    ++calls;
  });
  work.fail(Error(ErrorKind::kAborted, "on purpose"));
  EXPECT_EQ(calls, 2);
}

TEST(WorkCallbacks, NoneIsLostWhenAddedWhileTheOperationEnds) {
  for (int round = 0; round < 2000; ++round) {
    Work work(1);
    std::atomic<int> calls{0};
    std::thread worker([&] { work.complete(0); });
    for (int i = 0; i < 3; ++i) work.add_done_callback([&] { calls.fetch_add(1); });
    worker.join();
    ASSERT_EQ(calls.load(), 3);
  }
}

TEST(WorkCallbacks, OfAnEnqueuedOperationComeBeforeItEndsAndOnce) {
  for (const bool is_on_device : {true, false}) {
    Work work(1);
    std::vector<char> calls;
    work.add_done_callback([&] { calls.push_back('d'); });
    work.add_enqueued_callback([&] { calls.push_back('e'); });
    if (is_on_device) {
      emulated();  // registers the runtime of the event's device
      work.set_enqueued(std::make_shared<device::OwnedEvent>(Device{DeviceKind::kEmulated, 0}));
      EXPECT_EQ(calls, std::vector<char>{'e'});
      work.add_enqueued_callback([&] { calls.push_back('l'); });  // late: at once
      EXPECT_EQ(calls, (std::vector<char>{'e', 'l'}));
      work.complete(0);
      EXPECT_EQ(calls, (std::vector<char>{'e', 'l', 'd'}));
    } else {
      work.fail(Error(ErrorKind::kAborted, "on purpose"));
      EXPECT_EQ(calls, (std::vector<char>{'e', 'd'}));
      work.add_enqueued_callback([&] { calls.push_back('l'); });
      EXPECT_EQ(calls.back(), 'l');
    }
  }
}

TEST(CompletionQueue, KeepTheOrderOfEachThreadAndLoseNothingUntilClosed) {
  constexpr uint64_t kEach = 2000;
  CompletionQueue queue;
  std::vector<std::thread> workers;
  for (uint64_t thread = 0; thread < 3; ++thread) {
    workers.emplace_back([&queue, thread] {
      for (uint64_t i = 0; i < kEach; ++i) {
        Work work(1);
        work.add_done_callback([&queue, token = thread * kEach + i] { queue.push(token); });
        work.complete(0);
      }
    });
  }
  std::thread closer([&] {
    for (auto& worker : workers) worker.join();
    queue.close();
  });
  uint64_t next[3] = {0, 0, 0}, total = 0;
  while (const auto token = queue.next()) {
    EXPECT_EQ(*token % kEach, next[*token / kEach]++);
    ++total;
  }
  closer.join();
  EXPECT_EQ(total, 3 * kEach);
  EXPECT_FALSE(queue.next());
}

TEST(WorkCallbacks, RunOnTheWorkerWhichTheyCannotEnd) {
  auto communicators = make_communicators(2, kLocal);
  Engine first(std::move(communicators[0])), second(std::move(communicators[1]));
  std::atomic<bool> refused{false};
  // Rank 0 waits in its first operation until rank 1 takes part, so that the callback is there before the end.
  const Engine::Run meet = [](Context& context) -> uint64_t {
    uint8_t byte = 0;
    const int peer = 1 - context.group.rank();
    context.group.send_recv(peer, &byte, 1, peer, &byte, 1);
    return 0;
  };
  auto work = first.submit(stamp(0, 1), 1, 30s, meet);
  work->add_done_callback([&] {
    try {
      first.close();
    } catch (const Error& error) {
      refused = error.kind() == ErrorKind::kInvalidArgument;
    }
  });
  auto other = second.submit(stamp(0, 1), 1, 30s, meet);
  ASSERT_TRUE(work->wait_for(30s));
  ASSERT_TRUE(other->wait_for(30s));
  first.close();  // joins the worker, and so its callbacks
  EXPECT_TRUE(refused);
}

}  // namespace
}  // namespace bagua::testing

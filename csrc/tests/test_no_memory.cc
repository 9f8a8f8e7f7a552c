// The operator new of the test program, and what ends without memory or threads: an error that says so, where there is
// anybody to get it, and never the process.
#include "csrc/tests/test_no_memory.h"

#include <cstdlib>
#include <new>
#include <optional>

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "csrc/common/event_log.h"
#include "csrc/common/exhausted.h"
#include "csrc/common/reactor.h"
#include "csrc/engine/engine.h"
#include "csrc/tests/test_transport_pairs.h"
#include "csrc/transport/tcp/tcp_stream.h"

namespace bagua::testing {

thread_local int num_refused_left = 0;

void refuse_memory(int num_allocations) { num_refused_left = num_allocations; }

}  // namespace bagua::testing

void* operator new(size_t bytes) {
  int& left = bagua::testing::num_refused_left;
  if (left > 0) {
    --left;
    throw std::bad_alloc();
  }
  void* const data = std::malloc(bytes == 0 ? 1 : bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
// Without this one the address sanitizer has its own, whose memory the next would free.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
// Inlined, they would look to the compiler like a free() of what operator new has given.
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace bagua::testing {
namespace {

Operation collective() { return stamp(0, 1); }

std::optional<Error> error_of(const std::shared_ptr<Work>& work) {
  EXPECT_TRUE(work->wait_for(30s)) << "an operation did not end";
  return work->error();
}

void expect_no_memory(const std::optional<Error>& error, int rank) {
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTransport);
  EXPECT_EQ(error->rank(), rank);
  EXPECT_CONTAINS(std::string(error->what()), "no memory left; raise its memory limit");
}

TEST(EventLog, SpansWithoutMemoryForTheirRingCountAsLost) {
  EventLog log;
  log.set_ticket(1);
  const int64_t before_ns = EventLog::now_ns();
  {
    const NoMemory none;
    const EventSpan part(log, EventKind::kWire, 1);
    log.add(EventKind::kOperation, 10, 20, 1);
  }
  EXPECT_TRUE(log.take(false).empty());
  EXPECT_EQ(log.kept_since_ns().first, 20);
  EXPECT_GE(log.kept_since_ns().second, before_ns);
  log.add(EventKind::kOperation, 30, 40, 1);
  const auto events = log.take(false);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].begin_ns, 30);
}

TEST(NoMemory, AnOperationThatHasNoneFailsOnAllRanksAndNamesItsOwn) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(2, kShm)) {
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  }
  const auto allocates = [](Context&) -> uint64_t {
    const NoMemory none;
    return std::string(1000, ' ').size();
  };
  const auto waits = [](Context& context) -> uint64_t {
    uint8_t in;
    context.group.recv(0, &in, 1);
    return 0;
  };
  expect_no_memory(error_of(engines[0]->submit(collective(), 1, 30s, allocates)), 0);
  const auto remote = error_of(engines[1]->submit(collective(), 1, 30s, waits));
  ASSERT_TRUE(remote);
  EXPECT_EQ(remote->kind(), ErrorKind::kRemote);
  EXPECT_EQ(remote->rank(), 0);
}

// Between operations, where only the worker itself can notice.
TEST(NoMemory, AWorkerThatHasNoneForAMessageFailsIt) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(2, kLocal)) {
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  }
  uint8_t byte = 0;
  std::atomic<bool> is_queued{false};
  const auto first = engines[0]->submit(collective(), 1, 30s, [&](Context&) -> uint64_t {
    while (!is_queued) std::this_thread::yield();
    return 0;
  });
  const auto last = engines[0]->submit(collective(), 1, 30s, [](Context&) -> uint64_t {
    refuse_memory(1);
    return 0;
  });
  const auto message = engines[0]->submit_recv(1, &byte, 1, stamp(0, 1, OperationKind::kPointToPoint), 30s);
  is_queued = true;
  EXPECT_FALSE(error_of(first));
  EXPECT_FALSE(error_of(last));
  expect_no_memory(error_of(message), 0);
  expect_no_memory(error_of(engines[0]->run_inline(collective(), 1, 30s, [](Context&) -> uint64_t { return 0; })), 0);
}

TEST(NoMemory, AHandlerThatHasNoneHearsOfItAndTheReactorGoesOn) {
  struct Handler : Reactor::Handler {
    void on_ready() override {
      if (throws) throw std::bad_alloc();
      ++num_ready;
    }
    void on_exhausted() noexcept override { ++num_exhausted; }
    bool throws = false;
    std::atomic<int> num_ready{0}, num_exhausted{0};
  } failing, other;
  failing.throws = true;
  const auto reactor = Reactor::instance();
  const Descriptor fds[] = {Descriptor(eventfd(1, 0)), Descriptor(eventfd(1, 0))};
  const uint64_t first = reactor->add(fds[0].get(), &failing);
  EXPECT_TRUE(eventually([&] { return failing.num_exhausted > 0; }));
  const uint64_t second = reactor->add(fds[1].get(), &other);
  EXPECT_TRUE(eventually([&] { return other.num_ready > 0; }));
  EXPECT_EQ(failing.num_ready, 0);
  EXPECT_EQ(other.num_exhausted, 0);
  reactor->remove(first);
  reactor->remove(second);
}

TEST(NoMemory, AConnectionThatHasNoneHasFailed) {
  const auto pair = tcp_pair();
  Doorbell doorbell;
  TcpStream stream(pair[0], 1, doorbell);
  stream.throw_if_failed();
  stream.on_exhausted();
  EXPECT_THROW(stream.throw_if_failed(), std::bad_alloc);
  ::close(pair[1]);
}

TEST(NoThreads, TheErrorNamesTheThreadAndTheLimit) {
  const NoThreads none;
  std::optional<Error> error;
  try {
    start_thread("bagua-of-a-long-name", [] {}).join();
  } catch (const Error& refused) {
    error = refused;
  }
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTransport);
  EXPECT_CONTAINS(std::string(error->what()), "cannot start the thread 'bagua-of-a-long-name': Resource temporarily");
  EXPECT_CONTAINS(std::string(error->what()), "raise `ulimit -u`");
}

TEST(NoThreads, AnEngineThatCannotHaveItsOwnTellsItsPeers) {
  auto communicators = make_communicators(2, kShm);
  Engine other(std::move(communicators[1]));
  {
    const NoThreads none;
    std::optional<Error> error;
    try {
      const Engine engine(std::move(communicators[0]));
    } catch (const Error& refused) {
      error = refused;
    }
    ASSERT_TRUE(error);
    EXPECT_EQ(error->rank(), 0);
    EXPECT_CONTAINS(std::string(error->what()), "raise `ulimit -u`");
  }
  const auto remote = error_of(other.submit(collective(), 1, 30s, [](Context& context) -> uint64_t {
    uint8_t in;
    context.group.recv(0, &in, 1);
    return 0;
  }));
  ASSERT_TRUE(remote);
  EXPECT_EQ(remote->kind(), ErrorKind::kRemote);
  EXPECT_EQ(remote->rank(), 0);
  EXPECT_CONTAINS(std::string(remote->what()), "cannot start the thread");
}

}  // namespace
}  // namespace bagua::testing

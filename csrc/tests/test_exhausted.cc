// Threads and memory that end: the rank that notices it names itself and what to raise, and tells the peers.
#include "csrc/common/thread.h"

#include <new>
#include <optional>

#include <gtest/gtest.h>
#include <pthread.h>

#include "csrc/engine/engine.h"
#include "csrc/tests/test_transport_pairs.h"

namespace bagua::testing {
namespace {

std::optional<Error> error_of(const std::shared_ptr<Work>& work) {
  EXPECT_TRUE(work->wait_for(30s)) << "an operation did not end";
  return work->error();
}

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

TEST(Engine, AnOperationThatIsTooLargeForTheMemoryFailsOnAllRanksAndNamesItsOwn) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& communicator : make_communicators(2, kShm)) {
    engines.push_back(std::make_unique<Engine>(std::move(communicator)));
  }
  const auto own =
      error_of(engines[0]->submit(stamp(0, 1), 1, 30s, [](Context&) -> uint64_t { throw std::bad_alloc(); }));
  ASSERT_TRUE(own);
  EXPECT_EQ(own->kind(), ErrorKind::kTransport);
  EXPECT_EQ(own->rank(), 0);
  EXPECT_CONTAINS(std::string(own->what()), "no memory left for an operation; raise its memory limit");
  const auto remote = error_of(engines[1]->submit(stamp(0, 1), 1, 30s, [](Context& context) -> uint64_t {
    uint8_t in;
    context.group.recv(0, &in, 1);
    return 0;
  }));
  ASSERT_TRUE(remote);
  EXPECT_EQ(remote->kind(), ErrorKind::kRemote);
  EXPECT_EQ(remote->rank(), 0);
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
  const auto remote = error_of(other.submit(stamp(0, 1), 1, 30s, [](Context& context) -> uint64_t {
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

// Matching of posted sends and receives between two threads; see local_channel.h.
#include "csrc/transport/local/local_channel.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "csrc/common/error.h"
#include "csrc/common/fifo.h"

namespace bagua {
namespace {

struct Posted {
  MessageHeader header;
  void* data = nullptr;
  Request* request = nullptr;
};

// The state that the two ends share. Sides are 0 and 1; direction d carries messages from side d to side 1 - d.
struct Pair {
  struct Side {
    int rank = -1;
    Doorbell* doorbell = nullptr;  // nullptr once the end is destroyed
    Fifo<Posted> sends, recvs;
    std::optional<Error> failure;     // what this side's progress() throws
    std::atomic<bool> failed{false};  // failure is set; written under the mutex, read without
    std::atomic<uint64_t> completions{0};
  };
  std::mutex mutex;  // guards sides, except their atomics
  Side sides[2];

  void fail(int side, const Error& cause) {
    Side& s = sides[side];
    if (s.failure) return;
    s.failure = cause;
    s.failed.store(true, std::memory_order_release);
    if (s.doorbell != nullptr) s.doorbell->ring();
  }

  void complete(int side, Request* request) {
    Side& s = sides[side];
    request->done.store(true, std::memory_order_release);
    s.completions.fetch_add(1, std::memory_order_release);
    if (s.doorbell != nullptr) s.doorbell->ring();
  }

  // False when the two halves do not belong together; then both sides have failed.
  bool check_match(int sender, const MessageHeader& sent, const MessageHeader& expected) {
    if (sent.operation == expected.operation && sent.bytes == expected.bytes) return true;
    const int receiver = 1 - sender;
    for (const int side : {receiver, sender}) {
      const bool receives = side == receiver;
      try {
        check_header(receives ? sent : expected, receives ? expected : sent, sides[1 - side].rank);
      } catch (const Error& error) {
        fail(side, error);
      }
    }
    return false;
  }

  // Completes what has both halves in direction `sender`.
  void match(int sender) {
    Fifo<Posted>& sends = sides[sender].sends;
    Fifo<Posted>& recvs = sides[1 - sender].recvs;
    while (!sends.empty() && !recvs.empty()) {
      const Posted send = sends.front();
      const Posted recv = recvs.front();
      if (!check_match(sender, send.header, recv.header)) return;
      if (send.header.bytes > 0) std::memcpy(recv.data, send.data, send.header.bytes);
      sends.pop();
      recvs.pop();
      complete(1 - sender, recv.request);
      complete(sender, send.request);
    }
  }
};

class LocalChannel final : public Channel {
 public:
  LocalChannel(std::shared_ptr<Pair> pair, int side) : pair_(std::move(pair)), side_(side) {}

  ~LocalChannel() override {
    std::lock_guard lock(pair_->mutex);
    forget("closed its channel");
    mine().doorbell = nullptr;
    pair_->fail(1 - side_,
                Error(ErrorKind::kTransport, "rank " + std::to_string(mine().rank) + " has exited", mine().rank));
  }

  void post_send(const Operation& operation, const void* data, size_t bytes, Request* request) override {
    // const_cast: a send only reads through the pointer (Pair::match).
    post(mine().sends, {{operation, bytes}, const_cast<void*>(data), request}, side_);
  }

  void post_recv(const Operation& operation, void* data, size_t bytes, Request* request) override {
    post(mine().recvs, {{operation, bytes}, data, request}, 1 - side_);
  }

  bool progress() override {
    if (mine().failed.load(std::memory_order_acquire)) throw_if_wanted();
    const uint64_t completions = mine().completions.load(std::memory_order_acquire);
    const bool moved = completions != seen_;
    seen_ = completions;
    return moved;
  }

  void cancel() override {
    std::lock_guard lock(pair_->mutex);
    forget("withdrew");
  }

  bool addresses_any_memory() const override { return true; }
  bool shares_memory() const override { return true; }
  void* resolve(const Address& address, size_t) override { return reinterpret_cast<void*>(address.offset); }
  const char* kind() const override { return "local"; }

 private:
  Pair::Side& mine() { return pair_->sides[side_]; }

  void post(Fifo<Posted>& queue, const Posted& posted, int sender) {
    std::lock_guard lock(pair_->mutex);
    if (mine().failure) {
      refused_ = true;  // and progress() throws; nothing keeps the request
      return;
    }
    queue.push(posted);
    pair_->match(sender);
  }

  // Drops the posted requests. If there were any, the streams of the two ends no longer fit together, so the
  // peer fails too. The caller holds the mutex.
  void forget(const char* how) {
    if (mine().sends.empty() && mine().recvs.empty()) return;
    Fifo<Posted>& queue = mine().sends.empty() ? mine().recvs : mine().sends;
    const Operation operation = queue.front().header.operation;
    mine().sends.clear();
    mine().recvs.clear();
    const std::string who = "rank " + std::to_string(mine().rank);
    pair_->fail(1 - side_,
                Error(ErrorKind::kRemote, who + " failed: it " + how + " in the middle of " + describe(operation),
                      mine().rank, std::string(operation_name(operation.kind))));
  }

  // A peer that failed or went away is an error only for a caller that still wants something of it.
  void throw_if_wanted() {
    std::lock_guard lock(pair_->mutex);
    if (refused_ || !mine().sends.empty() || !mine().recvs.empty()) throw Error(*mine().failure);
  }

  const std::shared_ptr<Pair> pair_;
  const int side_;
  uint64_t seen_ = 0;     // completions that progress() has reported; worker thread only, as the next
  bool refused_ = false;  // something was posted after the failure
};

}  // namespace

void connect_local(const std::vector<Doorbell*>& doorbells,
                   const std::function<void(int rank, int peer, std::unique_ptr<Channel>)>& attach) {
  const int size = static_cast<int>(doorbells.size());  // a group has fewer ranks than an int counts
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      auto pair = std::make_shared<Pair>();
      const int ranks[2] = {a, b};
      for (int side = 0; side < 2; ++side) {
        pair->sides[side].rank = ranks[side];
        pair->sides[side].doorbell = doorbells[static_cast<size_t>(ranks[side])];
      }
      attach(a, b, std::make_unique<LocalChannel>(pair, 0));
      attach(b, a, std::make_unique<LocalChannel>(pair, 1));
    }
  }
}

}  // namespace bagua

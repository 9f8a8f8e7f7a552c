// A ring whose counters the peer has damaged: an error, and no byte outside of the segment is read or written.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "csrc/common/doorbell.h"
#include "csrc/common/error.h"
#include "csrc/common/shared_segments.h"
#include "csrc/transport/shm/shm_channel.h"

namespace bagua {
namespace {

constexpr size_t kRingBytes = 4096;  // less than what is copied at a time

struct Counters {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
};

// The dialer's channel, and what the peer can write to.
struct DamagedRings {
  Doorbell doorbell;
  Descriptor fd = create_sealed("test-rings", ShmChannel::segment_bytes(kRingBytes));
  uint8_t* segment = nullptr;
  std::unique_ptr<ShmChannel> channel;

  DamagedRings() {
    segment = static_cast<uint8_t*>(map_shared(fd.get(), ShmChannel::segment_bytes(kRingBytes)));
    channel = std::make_unique<ShmChannel>(1, dup(fd.get()), kRingBytes, true, dup(doorbell.fd()), nullptr);
  }
  ~DamagedRings() { unmap_shared(segment, ShmChannel::segment_bytes(kRingBytes)); }
  Counters& outgoing() { return *reinterpret_cast<Counters*>(segment); }
  uint8_t* incoming_ring() { return segment + ShmChannel::segment_bytes(kRingBytes) / 2; }
  Counters& incoming() { return *reinterpret_cast<Counters*>(incoming_ring()); }
};

void expect_damaged(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTransport);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("its memory is damaged"), std::string::npos) << error.what();
  }
}

TEST(ShmChannel, MoreToReadThanTheRingHolds) {
  DamagedRings rings;
  std::vector<uint8_t> into(64 << 10);
  Request request;
  const Operation operation{};
  const MessageHeader header{operation, into.size()};  // the expected one, so that its payload would follow
  std::memcpy(rings.incoming_ring() + sizeof(Counters), &header, sizeof header);
  for (uint64_t head : {kRingBytes + 1, uint64_t{1} << 20, ~uint64_t{0}}) {
    rings.incoming().head = head;
    expect_damaged([&] { rings.channel->post_recv(operation, into.data(), into.size(), &request); });
    rings.channel->cancel();
  }
}

TEST(ShmChannel, MoreReadThanWasWritten) {
  DamagedRings rings;
  const std::vector<uint8_t> from(64 << 10);
  Request request;
  for (uint64_t tail : {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0} - kRingBytes}) {
    rings.outgoing().tail = tail;
    expect_damaged([&] { rings.channel->post_send(Operation{}, from.data(), from.size(), &request); });
    rings.channel->cancel();
  }
}

TEST(ShmChannel, MemoryThatAPeerCouldTakeAwayIsRefused) {
  const Doorbell doorbell;
  const size_t bytes = ShmChannel::segment_bytes(kRingBytes);
  const auto refused = [&](int rings, int peer_doorbell) {
    try {
      ShmChannel channel(1, rings, kRingBytes, true, peer_doorbell, nullptr);
      return false;
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kTransport;
    }
  };
  const int unsealed = memfd_create("test-rings", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(unsealed, static_cast<off_t>(bytes)), 0);
  EXPECT_TRUE(refused(unsealed, dup(doorbell.fd())));
  EXPECT_TRUE(refused(dup(create_sealed("test-rings", bytes - 1).get()), dup(doorbell.fd())));
  EXPECT_TRUE(refused(dup(create_sealed("test-rings", bytes).get()), dup(create_sealed("test", 64).get())));
  EXPECT_TRUE(refused(open("/dev/null", O_RDWR | O_CLOEXEC), dup(doorbell.fd())));
  const Descriptor sealed = create_sealed("test-rings", bytes);
  EXPECT_NE(ftruncate(sealed.get(), 0), 0);
  EXPECT_FALSE(refused(dup(sealed.get()), dup(doorbell.fd())));
}

}  // namespace
}  // namespace bagua

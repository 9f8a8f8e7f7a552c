// Futex on shared words; see doorbell.h for the order that keeps rings from being lost.
#include "csrc/common/doorbell.h"

#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "csrc/common/shared_segments.h"

namespace bagua {
namespace {

// Not the private flavour: sleepers and ringers may be different processes.
long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

void ring(DoorbellWords& words) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (words.sleepers.load(std::memory_order_relaxed) == 0) return;
  words.epoch.fetch_add(1, std::memory_order_seq_cst);
  futex(&words.epoch, FUTEX_WAKE, 1 << 30, nullptr);
}

Doorbell::Doorbell(bool is_private) {
  if (is_private) {
    own_ = std::make_unique<DoorbellWords>();
    words_ = own_.get();
    return;
  }
  fd_ = create_sealed("bagua-doorbell", kDoorbellBytes);
  words_ = static_cast<DoorbellWords*>(
      map_shared(fd_.get(), kDoorbellBytes));  // zero-filled by the kernel, which is the initial state
}

Doorbell::~Doorbell() {
  if (!own_) unmap_shared(words_, kDoorbellBytes);
}

uint32_t Doorbell::prepare() {
  const uint32_t epoch = words_->epoch.load(std::memory_order_relaxed);
  words_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return epoch;
}

void Doorbell::cancel() { words_->sleepers.fetch_sub(1, std::memory_order_seq_cst); }

void Doorbell::sleep(uint32_t epoch, std::chrono::nanoseconds limit) {
  timespec timeout{static_cast<time_t>(limit.count() / 1'000'000'000),
                   static_cast<long>(limit.count() % 1'000'000'000)};
  futex(&words_->epoch, FUTEX_WAIT, epoch, &timeout);  // EAGAIN, EINTR and ETIMEDOUT all mean: look again
  cancel();
}

}  // namespace bagua

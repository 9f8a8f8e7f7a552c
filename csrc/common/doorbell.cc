// Futex on shared words; see doorbell.h for the order that keeps rings from being lost.
#include "csrc/common/doorbell.h"

#include <cerrno>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "csrc/common/error.h"

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

Doorbell::Doorbell() {
  fd_ = Descriptor(memfd_create("bagua-doorbell", MFD_CLOEXEC));
  if (fd_.get() < 0 || ftruncate(fd_.get(), 4096) != 0) {
    throw Error(ErrorKind::kTransport, std::string("cannot create a 4 KiB memfd: ") + std::strerror(errno));
  }
  void* mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorKind::kTransport, std::string("cannot map a 4 KiB memfd: ") + std::strerror(errno));
  }
  words_ = static_cast<DoorbellWords*>(mapped);  // zero-filled by the kernel, which is the initial state
}

Doorbell::~Doorbell() { munmap(words_, 4096); }

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

// memfd segments and the table of them; see shared_segments.h.
#include "csrc/common/shared_segments.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "csrc/common/error.h"

namespace bagua {
namespace {

[[noreturn]] void fail(const std::string& what, size_t bytes) {
  throw Error(ErrorKind::kTransport, what + " of " + std::to_string(bytes) + " bytes of shared memory failed: " +
                                         std::strerror(errno) + "; check the memory limit and `ulimit -n`");
}

// Gives the process pages of its own in place of those of a file that it maps privately. A page is copied when it is
// written to: by a value that it holds, so that no write of another thread is lost.
void own_pages(uint8_t* data, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t offset = 0; offset < bytes; offset += page) {
    std::atomic_ref<uint8_t> first(data[offset]);
    uint8_t value = first.load(std::memory_order_relaxed);
    while (!first.compare_exchange_weak(value, value)) {
    }
  }
}

// Asked before the old mapping goes, which a refusal would leave without a new one.
bool has_memory_for(size_t bytes) {
  void* probe = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED) return false;
  munmap(probe, bytes);
  return true;
}

}  // namespace

Descriptor create_sealed(const char* name, size_t bytes) {
  Descriptor fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("creation", bytes);
  }
  return fd;
}

void expect_sealed(int fd, size_t bytes) {
  struct stat status;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &status) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<uint64_t>(status.st_size) < bytes) {
    throw Error(ErrorKind::kTransport,
                "a peer passed shared memory that is not sealed or has fewer than " + std::to_string(bytes) + " bytes");
  }
}

void* map_shared(int fd, size_t bytes) {
  expect_sealed(fd, bytes);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail("mapping", bytes);
  madvise(data, bytes, MADV_HUGEPAGE);  // a hint: refused where shmem huge pages are off
  return data;
}

void unmap_shared(void* data, size_t bytes) { munmap(data, bytes); }

SegmentRegistry& SegmentRegistry::instance() {
  static PerProcess<SegmentRegistry> registry;
  return registry.get();
}

void* SegmentRegistry::create(size_t bytes) {
  Descriptor fd = create_sealed("bagua-segment", bytes);
  void* data = map_shared(fd.get(), bytes);
  std::lock_guard lock(mutex_);
  segments_[reinterpret_cast<uintptr_t>(data)] = {next_id_++, std::move(fd), bytes};
  return data;
}

void SegmentRegistry::release(void* data) {
  Segment segment;
  {
    std::lock_guard lock(mutex_);
    const auto found = segments_.find(reinterpret_cast<uintptr_t>(data));
    if (found == segments_.end()) return;
    segment = std::move(found->second);
    segments_.erase(found);
  }
  segment.fd.reset();
  unmap_shared(data, segment.bytes);
  if (segment.id != 0) tell_released(segment.id);
}

SegmentRegistry::Segments::iterator SegmentRegistry::find_locked(uint64_t id) {
  return std::find_if(segments_.begin(), segments_.end(), [id](auto& entry) { return entry.second.id == id; });
}

void SegmentRegistry::expose(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto found = find_locked(id);
  if (found != segments_.end()) ++found->second.num_exposures;
}

void SegmentRegistry::conceal(uint64_t id, bool isolates) {
  uint8_t* data = nullptr;
  size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = find_locked(id);
    if (found == segments_.end()) return;
    Segment& segment = found->second;
    segment.is_to_be_isolated = segment.is_to_be_isolated || isolates;
    if (--segment.num_exposures > 0 || !segment.is_to_be_isolated || !has_memory_for(segment.bytes)) return;
    data = reinterpret_cast<uint8_t*>(found->first);
    bytes = segment.bytes;
    if (mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, segment.fd.get(), 0) != data) return;
    segment.id = 0;
    segment.fd.reset();
  }
  own_pages(data, bytes);  // without the lock, which peers' requests need
  tell_released(id);
}

void SegmentRegistry::tell_released(uint64_t id) {
  std::lock_guard lock(listeners_mutex_);
  for (const auto& [token, on_release] : listeners_) on_release(id);
}

std::optional<Address> SegmentRegistry::find(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(mutex_);
  auto found = segments_.upper_bound(begin);
  if (found == segments_.begin()) return std::nullopt;
  --found;
  const uint64_t offset = begin - found->first;
  if (found->second.id == 0) return std::nullopt;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return std::nullopt;
  return Address{found->second.id, offset};
}

std::optional<SegmentRegistry::Handle> SegmentRegistry::duplicate(uint64_t id) const {
  std::lock_guard lock(mutex_);
  for (const auto& [begin, segment] : segments_) {
    if (segment.id == id) return Handle{Descriptor(fcntl(segment.fd.get(), F_DUPFD_CLOEXEC, 0)), segment.bytes};
  }
  return std::nullopt;
}

uint64_t SegmentRegistry::subscribe(std::function<void(uint64_t)> on_release) {
  std::lock_guard lock(listeners_mutex_);
  listeners_[next_token_] = std::move(on_release);
  return next_token_++;
}

void SegmentRegistry::unsubscribe(uint64_t token) {
  std::lock_guard lock(listeners_mutex_);
  listeners_.erase(token);
}

}  // namespace bagua

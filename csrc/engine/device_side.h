// DeviceSide: what a group keeps on one device: the stream on which its operations run, scratch memory, and pinned
// counters that the device reports in. For the group's worker thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/device/workspace.h"

namespace bagua {

class DeviceSide {
 public:
  explicit DeviceSide(Device device)
      : runtime_(device::runtime_of(device)), stream_(runtime_.create_stream(device)), workspace_(stream_) {}
  ~DeviceSide() {
    workspace_.clear();
    for (void* block : blocks_) runtime_.free_pinned(block);
    runtime_.destroy_stream(stream_);
  }
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  Stream stream() const { return stream_; }
  Workspace& workspace() { return workspace_; }
  const Workspace& workspace() const { return workspace_; }

  // In pinned memory; goes back to its side, which outlives it.
  using Counter = std::unique_ptr<uint64_t, std::function<void(uint64_t*)>>;

  Counter take_counter() {
    if (free_.empty()) {
      blocks_.push_back(runtime_.allocate_pinned(kCountersPerBlock * sizeof(uint64_t)));
      auto* counters = static_cast<uint64_t*>(blocks_.back());
      for (size_t i = 0; i < kCountersPerBlock; ++i) free_.push_back(counters + i);
    }
    uint64_t* const counter = free_.back();
    free_.pop_back();
    return {counter, [this](uint64_t* taken) { free_.push_back(taken); }};
  }

 private:
  static constexpr size_t kCountersPerBlock = 512;

  device::Runtime& runtime_;
  const Stream stream_;
  Workspace workspace_;
  std::vector<void*> blocks_;
  std::vector<uint64_t*> free_;
};

}  // namespace bagua

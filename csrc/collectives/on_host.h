// OnHost: a small reduction of a device's tensors that the host computes, where they are staged. A device needs some
// microseconds for every copy and kernel that it is asked for, and tenths of a millisecond where processes share it; so
// one copy each way is faster than those of every step, up to Thresholds::on_host_bytes. The bits are the CPU's, as
// they are on the device.
#pragma once

#include "csrc/collectives/collectives.h"

namespace bagua::collectives {

class OnHost {
 public:
  // Whether a reduction is one: `bytes` is what a rank puts in, and equal on all ranks.
  static bool is_for(const Context& context, size_t bytes) {
    return !context.stream.is_cpu() && context.pinned && bytes <= context.thresholds.on_host_bytes &&
           context.group.is_staged();
  }

  // Brings `input` here, which the host waits for. While it lives, the group's messages are the host's.
  OnHost(Context& on_device, const void* input, size_t bytes);
  ~OnHost() { device_.group.use_stream(device_.stream); }
  OnHost(const OnHost&) = delete;
  OnHost& operator=(const OnHost&) = delete;

  uint8_t* data() const { return data_; }
  Context& context() { return host_; }
  // Enqueued; data() holds it until the next operation.
  void copy_back(void* output, const void* result, size_t bytes);

 private:
  Context& device_;
  uint8_t* const data_;
  Context host_;
};

}  // namespace bagua::collectives

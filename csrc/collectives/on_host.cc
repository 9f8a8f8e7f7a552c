// The copies there and back; see on_host.h.
#include "csrc/collectives/on_host.h"

#include <algorithm>

#include "csrc/device/event.h"

namespace bagua::collectives {

namespace {

constexpr size_t kLeastBytes = 64 << 10;  // pinned: small ones share a block that need not grow

}  // namespace

OnHost::OnHost(Context& on_device, const void* input, size_t bytes)
    : device_(on_device),
      data_(static_cast<uint8_t*>(on_device.pinned(std::max(bytes, kLeastBytes)))),
      host_{on_device.group,      on_device.host_workspace, on_device.host_workspace, on_device.events, {},
            on_device.thresholds, on_device.rng_key} {
  device::runtime_of(device_.stream.device).copy_to_host(data_, input, bytes, device_.stream);
  const auto copied = device::recorded_event(device_.stream);
  device_.group.wait_for_device([&] { return copied->is_done(); });
  device_.group.use_stream({});
}

void OnHost::copy_back(void* output, const void* result, size_t bytes) {
  device::runtime_of(device_.stream.device).copy_from_host(output, result, bytes, device_.stream);
}

}  // namespace bagua::collectives

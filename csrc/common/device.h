// A device is where memory lies, a stream orders the work on it. On the CPU a stream means "now, on the calling
// thread"; on a device it is a queue, whose handle may be null: CUDA's default stream is. So ask for the kind, never
// for the handle.
#pragma once

#include <cstdint>
#include <string>

namespace bagua {

// Wire values: append, never renumber.
enum class DeviceKind : uint8_t {
  kCpu = 0,
  kCuda,
  kEmulated,  // of the tests: kernels run on the host, late, on memory that the host cannot touch
};
inline constexpr int kNumDeviceKinds = 3;

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  bool is_cpu() const { return kind == DeviceKind::kCpu; }
  bool operator==(const Device&) const = default;
};

constexpr const char* device_kind_name(DeviceKind kind) {
  constexpr const char* names[kNumDeviceKinds] = {"cpu", "cuda", "emulated"};
  return names[static_cast<int>(kind)];
}

// "cpu", "cuda:0"
inline std::string device_name(Device device) {
  const std::string kind = device_kind_name(device.kind);
  return device.is_cpu() ? kind : kind + ":" + std::to_string(device.index);
}

struct Stream {
  Device device;
  void* handle = nullptr;

  bool is_cpu() const { return device.is_cpu(); }
  bool operator==(const Stream&) const = default;
};

}  // namespace bagua

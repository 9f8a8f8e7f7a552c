// Conversions that several binding files need.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/error.h"

namespace bagua {

// An instance of the class of bagua/errors.py, and back. Both need the GIL.
pybind11::object to_python(const Error& error);
Error from_python(const pybind11::object& exception);

// Thirty years: longer ones would not fit into 64 bits of nanoseconds.
inline constexpr double kLongestSeconds = 1e9;

inline std::chrono::nanoseconds seconds(double value) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(value, kLongestSeconds) * 1e9));
}

// The addresses of tensors cross as integers.
inline void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

inline Stream stream_from(int kind, int index, uintptr_t handle) {
  if (kind < 0 || kind >= kNumDeviceKinds) {
    throw Error(ErrorKind::kInternal,
                "device kind " + std::to_string(kind) + " is not in 0.." + std::to_string(kNumDeviceKinds - 1));
  }
  return {{static_cast<DeviceKind>(kind), index}, pointer(handle)};
}

// Kind and index of a device, and the handle of a stream there; None is the CPU.
using StreamChoice = std::optional<std::tuple<int, int, uintptr_t>>;

inline Stream chosen(const StreamChoice& stream) {
  return stream ? stream_from(std::get<0>(*stream), std::get<1>(*stream), std::get<2>(*stream)) : Stream{};
}

// Finds it by its name; throws InvalidArgument.
DeviceKind device_kind_from(const std::string& name);

inline DType dtype_from(int code) {
  if (code < 0 || code >= kNumDTypes) {
    throw Error(ErrorKind::kInternal,
                "dtype code " + std::to_string(code) + " is not in 0.." + std::to_string(kNumDTypes - 1));
  }
  return static_cast<DType>(code);
}

}  // namespace bagua

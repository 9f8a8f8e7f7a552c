// How the emulated device refuses: what a caller can handle is an Error, what only a bug does ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "csrc/common/error.h"

namespace bagua::device {

[[noreturn]] inline void fail(const std::string& message) { throw Error(ErrorKind::kDevice, message); }

[[noreturn]] inline void die(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::abort();
}

inline std::string hexadecimal(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", address);
  return text;
}

}  // namespace bagua::device

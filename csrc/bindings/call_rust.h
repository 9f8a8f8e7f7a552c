// Calls into the Rust core, whose errors become Errors.
#pragma once

#include "bagua_rust.h"
#include "csrc/common/error.h"

namespace bagua {

// Runs one function of the C ABI; its error argument is appended here.
template <typename Function, typename... Arguments>
void call_rust(const char* operation, Function function, Arguments... arguments) {
  BaguaRustError error;
  const int32_t status = function(arguments..., &error);
  if (status == BAGUA_RUST_OK) return;
  const bool is_callers_mistake = status < BAGUA_RUST_INTERNAL && status != BAGUA_RUST_NULL_POINTER;
  throw Error(is_callers_mistake ? ErrorKind::kInvalidArgument : ErrorKind::kInternal, error.message,
              /*rank=*/-1, operation);
}

}  // namespace bagua

// How ranks of one host come to read and write each other's buffers: every rank tells every rank where its
// buffer lies in shared memory, or that it does not, so that all ranks know alike what is possible.
//
// Lifetime: between exchange_buffers and the last use of a peer's memory the peer must stay inside the
// collective. Therefore every collective that uses these pointers ends with a barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/collectives/collectives.h"

namespace bagua::collectives {

enum class Sharing {
  kNone,     // some rank's buffer is ordinary memory, and no staging was offered
  kBuffers,  // `at` are the buffers
  kStaging,  // `at` are the staging blocks
};

// Tables with one entry per rank, in workspace slot kTables, until the next exchange.
struct SharedBuffers {
  Sharing sharing = Sharing::kNone;
  uint8_t** at = nullptr;          // valid in this process; the own entry is the own pointer
  const void** sources = nullptr;  // for the caller's use
  void** destinations = nullptr;   // for the caller's use
};

// Every rank passes `bytes` bytes of buffer (staging_bytes of staging, or nullptr); the sizes are equal on
// all ranks. One message of 40 bytes to and from every peer.
SharedBuffers exchange_buffers(Context& context, const void* buffer, size_t bytes, void* staging, size_t staging_bytes);

}  // namespace bagua::collectives

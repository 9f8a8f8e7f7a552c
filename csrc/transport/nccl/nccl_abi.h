// The part of NCCL's binary interface that is used: numbers, layouts and signatures, which it has kept since
// version 2.14. So bagua builds without NCCL, and runs with whichever version torch has brought.
#pragma once

#include <climits>
#include <cstddef>

namespace bagua::nccl {

using Communicator = struct CommunicatorImpl*;
using StreamHandle = void*;  // cudaStream_t

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct UniqueId {
  char internal[128];
};

constexpr int version_code(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }

// The first that has communicators which do not block, and finalize.
inline constexpr int kMinVersion = version_code(2, 14, 0);

// The layout of kMinVersion. Later versions have more fields, and take their defaults for those that `size` leaves out.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kMinVersion;
  int blocking = INT_MIN;  // undefined
};

// The functions, by the names of their symbols without "nccl"; X(name, result, arguments).
#define BAGUA_NCCL_FUNCTIONS(X)                                                                                      \
  X(GetVersion, Result, (int* version))                                                                              \
  X(GetUniqueId, Result, (UniqueId * id))                                                                            \
  X(CommInitRankConfig, Result, (Communicator * made, int size, UniqueId id, int rank, Config* config))              \
  X(CommFinalize, Result, (Communicator))                                                                            \
  X(CommDestroy, Result, (Communicator))                                                                             \
  X(CommAbort, Result, (Communicator))                                                                               \
  X(CommGetAsyncError, Result, (Communicator, Result * error))                                                       \
  X(GetErrorString, const char*, (Result))                                                                           \
  X(GetLastError, const char*, (Communicator))                                                                       \
  X(GroupStart, Result, ())                                                                                          \
  X(GroupEnd, Result, ())                                                                                            \
  X(Send, Result, (const void* data, size_t count, DataType, int peer, Communicator, StreamHandle))                  \
  X(Recv, Result, (void* data, size_t count, DataType, int peer, Communicator, StreamHandle))                        \
  X(AllReduce, Result, (const void* input, void* output, size_t count, DataType, RedOp, Communicator, StreamHandle)) \
  X(ReduceScatter, Result,                                                                                           \
    (const void* input, void* output, size_t count, DataType, RedOp, Communicator, StreamHandle))                    \
  X(AllGather, Result, (const void* input, void* output, size_t count, DataType, Communicator, StreamHandle))        \
  X(Broadcast, Result,                                                                                               \
    (const void* input, void* output, size_t count, DataType, int root, Communicator, StreamHandle))                 \
  X(Reduce, Result,                                                                                                  \
    (const void* input, void* output, size_t count, DataType, RedOp, int root, Communicator, StreamHandle))

}  // namespace bagua::nccl

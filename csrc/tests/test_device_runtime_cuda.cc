// Tests of what bagua asks of the CUDA runtime (csrc/device/cuda/runtime.cc), over one that only takes notes: which
// device is the thread's current one in every call, what is refused before CUDA is asked, and what its errors become.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/device/runtime.h"
#include "csrc/tests/emulated_cuda/cuda_runtime.h"

namespace {

// The current device at the last call of each function.
std::map<std::string, int> called_on;
std::map<std::string, cudaError_t> errors;  // of the next call
bool is_capturing = false;
int handle;  // whose address stands for whatever CUDA makes

cudaError_t note(const char* function) {
  called_on[function] = cuda_emulation::counters.devices.back();
  const auto told = errors.find(function);
  if (told == errors.end()) return cudaSuccess;
  const cudaError_t error = told->second;
  errors.erase(told);
  return error;
}

cudaError_t note_made(const char* function, void** made) {
  *made = &handle;
  return note(function);
}

}  // namespace

using cudaEvent_t = void*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum : unsigned {
  cudaHostAllocPortable = 1,
  cudaStreamNonBlocking = 1,
  cudaEventDefault = 0,
  cudaEventDisableTiming = 2
};
struct cudaDeviceProp {
  char name[256];
  struct {
    char bytes[16];
  } uuid;
  size_t totalGlobalMem;
  int major, minor;
};

static cudaError_t cudaGetDevice(int* device) {
  *device = cuda_emulation::counters.devices.back();
  return cudaSuccess;
}
static cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  *unused = 1000;
  *total = 2000;
  return note("cudaMemGetInfo");
}
static cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"a GPU", {"\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd"}, 2000, 9, 0};
  return note("cudaGetDeviceProperties");
}
static cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int index) {
  std::snprintf(id, static_cast<size_t>(bytes), "0000:0%d:00.0", index);
  return note("cudaDeviceGetPCIBusId");
}
static cudaError_t cudaMallocAsync(void** made, size_t, cudaStream_t) { return note_made("cudaMallocAsync", made); }
static cudaError_t cudaFreeAsync(void*, cudaStream_t) { return note("cudaFreeAsync"); }
static cudaError_t cudaHostAlloc(void** made, size_t, unsigned flags) {
  EXPECT_EQ(flags, cudaHostAllocPortable);  // copies of every device of the process use it
  return note_made("cudaHostAlloc", made);
}
static cudaError_t cudaFreeHost(void*) { return note("cudaFreeHost"); }
static cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return note("cudaMemsetAsync"); }
static cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return note("cudaDeviceGetStreamPriorityRange");
}
static cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  EXPECT_EQ(flags, cudaStreamNonBlocking);
  EXPECT_EQ(priority, -5);
  return note_made("cudaStreamCreateWithPriority", made);
}
static cudaError_t cudaStreamDestroy(cudaStream_t) { return note("cudaStreamDestroy"); }
static cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return note("cudaStreamIsCapturing");
}
static cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return note("cudaStreamWaitEvent"); }
static cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  return note_made("cudaEventCreateWithFlags", made);
}
static cudaError_t cudaEventDestroy(cudaEvent_t) { return note("cudaEventDestroy"); }
static cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return note("cudaEventRecord"); }
static cudaError_t cudaEventQuery(cudaEvent_t) { return note("cudaEventQuery"); }
static cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.5f;
  return note("cudaEventElapsedTime");
}

// Under another name, and not registered: a build with CUDA has its own.
static bagua::device::Runtime* noted_runtime = nullptr;
#define cuda cuda_on_fibres
#define register_runtime(kind, runtime) static_cast<void>(noted_runtime = (runtime))
#include "csrc/device/cuda/runtime.cc"
#undef register_runtime
#undef cuda

namespace bagua::device::cuda_on_fibres {

int num_devices() { return 4; }

}  // namespace bagua::device::cuda_on_fibres

namespace bagua {
namespace {

class CudaRuntimeCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    called_on.clear();
    errors.clear();
    cuda_emulation::counters.devices = {0};
  }
  void TearDown() override { is_capturing = false; }

  static void expect_error(ErrorKind kind, const std::string& part, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no error, expected one with: " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  device::Runtime& runtime = *noted_runtime;
  const Device device{DeviceKind::kCuda, 3};
  const Stream stream{device, &handle};
};

TEST_F(CudaRuntimeCalls, HaveTheDeviceOfTheirStreamAndLeaveTheThreadsOwn) {
  int here = 0;
  const std::vector<std::function<void()>> calls = {
      [&] { runtime.allocate(64, stream); },
      [&] { runtime.free(&handle, stream); },
      [&] { runtime.allocate_pinned(64); },
      [&] { runtime.free_pinned(&here); },
      [&] { runtime.fill_zero(&handle, 4, stream); },
      [&] { runtime.create_stream(device); },
      [&] { runtime.destroy_stream(stream); },
      [&] { runtime.create_event(device); },
      [&] { runtime.create_timing_event(device); },
      [&] { runtime.record(&handle, stream); },
      [&] { runtime.is_done(&handle); },
      [&] { runtime.wait(stream, &handle); },
      [&] { runtime.elapsed_ns(&handle, &handle); },
      [&] { runtime.destroy_event(&handle); },
      [&] { runtime.device_id(device); },
  };
  for (const auto& call : calls) call();
  EXPECT_EQ(called_on.size(), 16u);
  for (const auto& [function, current] : called_on) EXPECT_EQ(current, 3) << function;
  using Copy = void (device::Runtime::*)(void*, const void*, size_t, Stream);
  for (const Copy copy : {&device::Runtime::copy, &device::Runtime::copy_to_host, &device::Runtime::copy_from_host}) {
    int from = 7, to = 0;
    cuda_emulation::counters.launched_on = -1;
    (runtime.*copy)(&to, &from, sizeof from, stream);
    EXPECT_EQ(cuda_emulation::counters.launched_on, 3);
    EXPECT_EQ(cuda_emulation::counters.launched_in, &handle);
  }
  EXPECT_EQ(cuda_emulation::counters.devices, std::vector<int>{0});
}

TEST_F(CudaRuntimeCalls, NothingIsAskedForNoBytes) {
  EXPECT_EQ(runtime.allocate(0, stream), nullptr);
  EXPECT_EQ(runtime.allocate_pinned(0), nullptr);
  runtime.free(nullptr, stream);
  runtime.free_pinned(nullptr);
  runtime.fill_zero(nullptr, 0, stream);
  runtime.copy(nullptr, nullptr, 0, stream);
  EXPECT_TRUE(called_on.empty());
}

// It would take our streams along, and the first look at one of their events would end it.
TEST_F(CudaRuntimeCalls, AStreamThatIsBeingCapturedIsRefused) {
  is_capturing = true;
  for (const std::function<void()>& call : std::vector<std::function<void()>>{[&] { runtime.record(&handle, stream); },
                                                                              [&] { runtime.wait(stream, &handle); }}) {
    expect_error(ErrorKind::kInvalidArgument, "stream of cuda:3 is being captured into a CUDA graph", call);
  }
  EXPECT_EQ(called_on.count("cudaEventRecord"), 0u);
  EXPECT_EQ(called_on.count("cudaStreamWaitEvent"), 0u);
}

TEST_F(CudaRuntimeCalls, AnEventThatIsNotDoneIsNoError) {
  errors["cudaEventQuery"] = cudaErrorNotReady;
  EXPECT_FALSE(runtime.is_done(&handle));
  EXPECT_TRUE(runtime.is_done(&handle));
}

TEST_F(CudaRuntimeCalls, ErrorsSayWhatToDo) {
  errors["cudaMallocAsync"] = cudaErrorMemoryAllocation;
  expect_error(ErrorKind::kDevice, "cuda:3 is out of memory: asked for 64 bytes, 1000 bytes are free of 2000",
               [&] { runtime.allocate(64, stream); });
  errors["cudaHostAlloc"] = cudaErrorMemoryAllocation;
  expect_error(ErrorKind::kDevice, "cannot pin 64 bytes", [&] { runtime.allocate_pinned(64); });
  errors["cudaEventRecord"] = cudaErrorLaunchFailure;
  expect_error(ErrorKind::kDevice, "an earlier kernel may be the cause", [&] { runtime.record(&handle, stream); });
  errors["cudaEventCreateWithFlags"] = cudaErrorInitializationError;
  expect_error(ErrorKind::kInvalidArgument, "forked after CUDA had been used", [&] { runtime.create_event(device); });
}

TEST_F(CudaRuntimeCalls, ReleasesThatFailAreQuiet) {
  for (const char* release : {"cudaFreeAsync", "cudaFreeHost", "cudaStreamDestroy", "cudaEventDestroy"}) {
    errors[release] = cudaErrorLaunchFailure;
  }
  runtime.free(&handle, stream);
  runtime.free_pinned(&handle);
  runtime.destroy_stream(stream);
  runtime.destroy_event(&handle);
  EXPECT_TRUE(errors.empty());
}

TEST_F(CudaRuntimeCalls, ADeviceIsKnownByItsUuidAndItsPlaceByTheBus) {
  EXPECT_EQ(runtime.bus_id(device), "0000:03:00.0");
  EXPECT_EQ(runtime.device_id(device), "GPU-01234567-89ab-cdef-0123-456789abcd00");
}

}  // namespace
}  // namespace bagua

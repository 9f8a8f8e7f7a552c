// A libnccl for the tests: NCCL's binary interface over a device whose kernels the host executes. It records the calls,
// moves the bytes on the streams, and notes what NCCL would not forgive. Its ranks are threads or processes of a host.
//
// This is what a test asks of it, beside NCCL's own functions: C, since who opens the library shares no code with it.
#pragma once

#include <cstddef>

extern "C" {

// The needs of the fake of the device. None of them throws.
struct FakeNcclDevice {
  int (*current_device)();
  // Executes run(argument) in the stream's order; false if the stream is not one of the device.
  bool (*enqueue)(int device, void* stream, const char* name, void (*run)(void*), void* argument);
  // Inside run: where `bytes` bytes of device memory are for the host; null if they are not the device's.
  void* (*host_address)(const void* device_address);
};

// Before the first communicator.
using FakeNcclUseDevice = void (*)(const FakeNcclDevice*);  // fake_nccl_use_device
// Forgets what it was told below and what it has recorded.
using FakeNcclReset = void (*)();                     // fake_nccl_reset
using FakeNcclSetVersion = void (*)(int version);     // fake_nccl_set_version
using FakeNcclFail = void (*)(int rank, int result);  // fake_nccl_fail_init, fake_nccl_fail_async
// Work that the rank has enqueued from then on ends when it is aborted, and not before.
using FakeNcclHang = void (*)(int rank);  // fake_nccl_hang
// Calls of a rank, or of all (-1), one a line: "init", "all_reduce", "group{send 1 400, recv 1 400}", "abort", ...
using FakeNcclText = const char* (*)(int rank);  // fake_nccl_calls
// Mistakes that NCCL would not forgive, one a line.
using FakeNcclViolations = const char* (*)();  // fake_nccl_violations
using FakeNcclCount = int (*)();               // fake_nccl_num_communicators, that live
}

// Tests of what runtime.h promises, on every device that there is: the emulated one everywhere, CUDA's where the build
// has it and a GPU is at hand. A build with CUDA on a machine without a driver says so, whatever it is asked.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/device/memory.h"
#include "csrc/kernels/reduce.h"
#include "csrc/tests/emulated_device/emulated_runtime.h"

namespace bagua {
namespace {

using device::Event;
using device::Runtime;
using std::chrono::steady_clock;

class Runtimes : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::kEmulated) {
      emulated_ = std::make_unique<device::EmulatedRuntime>(1);
      device::register_runtime(DeviceKind::kEmulated, emulated_.get());
    } else if (!device::has_runtime(GetParam())) {
      GTEST_SKIP() << "this build has no runtime for " << device_kind_name(GetParam());
    }
    runtime_ = &device::runtime_of(kDevice);
    if (runtime_->num_devices() == 0) GTEST_SKIP() << "there is no " << device_name(kDevice);
    stream_ = runtime_->create_stream(kDevice);
    done_ = runtime_->create_event(kDevice);
  }
  void TearDown() override {
    if (done_ != nullptr) runtime_->destroy_event(done_);
    if (stream_.handle != nullptr) runtime_->destroy_stream(stream_);
    if (emulated_ != nullptr) device::register_runtime(DeviceKind::kEmulated, nullptr);
  }

  // Waits for what the stream has to do, as the engine does: by asking.
  void synchronize(Stream stream) {
    runtime_->record(done_, stream);
    const auto deadline = steady_clock::now() + std::chrono::seconds(30);
    while (!runtime_->is_done(done_)) {
      ASSERT_LT(steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }

  const Device kDevice{GetParam(), 0};
  std::unique_ptr<device::EmulatedRuntime> emulated_;
  Runtime* runtime_ = nullptr;
  Stream stream_{};
  Event done_ = nullptr;
};

TEST_P(Runtimes, MemoryMovesInTheStreamsOrder) {
  constexpr size_t kNumel = 100000, kBytes = kNumel * 4;
  for (const Stream stream : {stream_, Stream{kDevice, nullptr}}) {  // the default stream's handle is null
    auto* const host = static_cast<float*>(runtime_->allocate_pinned(kBytes));
    auto* const back = static_cast<float*>(runtime_->allocate_pinned(kBytes));
    void* const a = runtime_->allocate(kBytes, stream);
    void* const b = runtime_->allocate(kBytes, stream);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b) % 256, 0u);
    for (size_t i = 0; i < kNumel; ++i) host[i] = static_cast<float>(i);
    runtime_->copy_from_host(a, host, kBytes, stream);
    device::copy(b, a, kBytes, stream);
    kernels::reduce_into(ReduceOp::kSum, DType::kF32, b, a, kNumel, stream);
    device::fill_zero(b, 40, stream);
    runtime_->copy_to_host(back, b, kBytes, stream);
    runtime_->free(a, stream);
    runtime_->free(b, stream);
    synchronize(stream);
    for (size_t i = 0; i < kNumel; ++i) ASSERT_EQ(back[i], i < 10 ? 0.0f : 2.0f * static_cast<float>(i)) << i;
    runtime_->free_pinned(host);
    runtime_->free_pinned(back);
  }
}

TEST_P(Runtimes, NoBytesAreLegal) {
  EXPECT_EQ(runtime_->allocate(0, stream_), nullptr);
  EXPECT_EQ(runtime_->allocate_pinned(0), nullptr);
  runtime_->free(nullptr, stream_);
  runtime_->free_pinned(nullptr);
  runtime_->copy(nullptr, nullptr, 0, stream_);
  runtime_->copy_to_host(nullptr, nullptr, 0, stream_);
  runtime_->copy_from_host(nullptr, nullptr, 0, stream_);
  runtime_->fill_zero(nullptr, 0, stream_);
  synchronize(stream_);
}

// One stream adds to what the other one has written, fifty times there and back, each behind the other's event.
TEST_P(Runtimes, EventsOrderStreams) {
  constexpr size_t kNumel = 1 << 16, kBytes = kNumel * 4;
  const Stream other = runtime_->create_stream(kDevice);
  const Event from_first = runtime_->create_event(kDevice), from_other = runtime_->create_event(kDevice);
  EXPECT_TRUE(runtime_->is_done(from_first));  // never recorded
  runtime_->wait(other, from_first);           // waits for nothing
  auto* const host = static_cast<int32_t*>(runtime_->allocate_pinned(kBytes));
  void* const sum = runtime_->allocate(kBytes, stream_);
  void* const one = runtime_->allocate(kBytes, stream_);
  for (size_t i = 0; i < kNumel; ++i) host[i] = 1;
  runtime_->copy_from_host(one, host, kBytes, stream_);
  runtime_->fill_zero(sum, kBytes, stream_);
  for (int i = 0; i < 50; ++i) {
    kernels::reduce_into(ReduceOp::kSum, DType::kI32, sum, one, kNumel, stream_);
    runtime_->record(from_first, stream_);
    runtime_->wait(other, from_first);
    kernels::reduce_into(ReduceOp::kSum, DType::kI32, sum, one, kNumel, other);
    runtime_->record(from_other, other);
    runtime_->wait(stream_, from_other);
  }
  runtime_->copy_to_host(host, sum, kBytes, stream_);
  synchronize(stream_);
  for (size_t i = 0; i < kNumel; ++i) ASSERT_EQ(host[i], 100) << i;
  runtime_->free(sum, stream_);
  runtime_->free(one, stream_);
  runtime_->free_pinned(host);
  runtime_->destroy_event(from_first);
  runtime_->destroy_event(from_other);
  runtime_->destroy_stream(other);
}

TEST_P(Runtimes, MemoryThatIsNotThereIsADeviceError) {
  const size_t bytes = size_t{1} << 50;
  try {
    runtime_->allocate(bytes, stream_);
    FAIL() << "a petabyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kDevice);
    const std::string message = error.what();
    EXPECT_NE(message.find(device_name(kDevice) + " is out of memory: asked for " + std::to_string(bytes)),
              std::string::npos)
        << message;
  }
  void* const memory = runtime_->allocate(256, stream_);  // the error is over
  runtime_->free(memory, stream_);
  synchronize(stream_);
}

TEST_P(Runtimes, ADeviceThatIsNotThereIsTheCallersMistake) {
  const Device missing{GetParam(), 63};
  try {
    runtime_->create_stream(missing);
    FAIL() << device_name(missing) << " has a stream";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("there is no " + device_name(missing)), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Device, Runtimes, ::testing::Values(DeviceKind::kEmulated, DeviceKind::kCuda),
                         [](const auto& kind) { return std::string(device_kind_name(kind.param)); });

TEST(CudaWithoutADriver, EveryCallSaysSo) {
  if (!device::has_runtime(DeviceKind::kCuda)) GTEST_SKIP() << "this build has no CUDA";
  const Device cuda{DeviceKind::kCuda, 0};
  const Stream stream{cuda, nullptr};
  Runtime& runtime = device::runtime_of(cuda);
  if (runtime.num_devices() > 0) GTEST_SKIP() << "there is a GPU";
  int memory = 0;
  const std::vector<std::function<void()>> calls = {
      [&] { runtime.allocate(64, stream); },
      [&] { runtime.allocate_pinned(64); },
      [&] { runtime.create_stream(cuda); },
      [&] { runtime.create_event(cuda); },
      [&] { runtime.fill_zero(&memory, sizeof memory, stream); },
      [&] { runtime.is_done(&memory); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    try {
      calls[i]();
      ADD_FAILURE() << "call " << i << " succeeds";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("move the tensors to the CPU"), std::string::npos) << error.what();
    }
  }
  runtime.free(&memory, stream);  // noexcept, and quiet
  runtime.free_pinned(&memory);
  runtime.destroy_event(&memory);
}

}  // namespace
}  // namespace bagua

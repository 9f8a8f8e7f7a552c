// The part that the tests of the CUDA kernels on fibres share. A file that includes .cu files gives the namespace
// `cuda` another name first, because the library has that one already.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/tests/emulated_cuda/cuda_runtime.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua::testing {

inline int cuda_queue;  // whose address stands for a stream
inline const Stream kCudaStream{{DeviceKind::kCuda, 0}, &cuda_queue};

#if defined(__SANITIZE_THREAD__)
#define BAGUA_SKIP_WITHOUT_FIBRES() GTEST_SKIP() << "the thread sanitizer does not follow fibres"
#else
#define BAGUA_SKIP_WITHOUT_FIBRES() static_cast<void>(0)
#endif

// `num_bytes` of garbage, `skew` bytes after a multiple of 16, between pages that fault: the last byte is at most 15
// bytes before the second. What lies between is checked.
class GuardedArray {
 public:
  explicit GuardedArray(size_t num_bytes, size_t skew = 0) : num_bytes_(num_bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (num_bytes + skew + 16 + page - 1) / page * page;
    std::vector<uint8_t*>& unused = pool()[size_];
    if (unused.empty()) {
      void* memory = mmap(nullptr, size_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      begin_ = static_cast<uint8_t*>(memory) + page;
      if (memory == MAP_FAILED || mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    } else {
      begin_ = unused.back();
      unused.pop_back();
    }
    data_ = begin_ + (size_ - num_bytes - skew) / 16 * 16 + skew;
    std::memset(data_ - kChecked(), kGarbage, static_cast<size_t>(begin_ + size_ - data_) + kChecked());
  }
  ~GuardedArray() { pool()[size_].push_back(begin_); }
  GuardedArray(const GuardedArray&) = delete;

  uint8_t* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size_bytes() const { return num_bytes_; }
  void assign(const void* source) {
    if (num_bytes_ > 0) std::memcpy(data_, source, num_bytes_);
  }
  std::vector<uint8_t> copy() const { return {data_, data_ + num_bytes_}; }

  void expect_untouched_around() const {
    for (const uint8_t* byte = data_ - kChecked(); byte < begin_ + size_; ++byte) {
      if (byte == data_) byte += num_bytes_;
      if (byte == begin_ + size_) break;
      ASSERT_EQ(*byte, kGarbage) << "written at " << byte - data_ << " of " << num_bytes_ << " bytes";
    }
  }

 private:
  static constexpr uint8_t kGarbage = 0xc3;
  // Bytes before the array that are checked.
  size_t kChecked() const { return std::min<size_t>(16, static_cast<size_t>(data_ - begin_)); }
  static std::map<size_t, std::vector<uint8_t*>>& pool() {
    static std::map<size_t, std::vector<uint8_t*>> unused;
    return unused;
  }

  size_t num_bytes_, size_;
  uint8_t *begin_, *data_;
};

// `nan_is_nan`: where both are NaN the payload does not matter, because arithmetic has made it.
inline void expect_bits(DType dtype, const GuardedArray& got, const std::vector<uint8_t>& expected, bool nan_is_nan,
                        const char* what) {
  ASSERT_EQ(got.size_bytes(), expected.size());
  got.expect_untouched_around();
  if (same_bits(got.data(), expected.data(), expected.size())) return;
  const size_t item = item_bytes(dtype);
  for (size_t i = 0; i < expected.size() / item; ++i) {
    if (same_bits(got.data() + i * item, expected.data() + i * item, item)) continue;
    if (is_floating(dtype)) {
      const double value = load_real(dtype, got.data(), i), wanted = load_real(dtype, expected.data(), i);
      if (nan_is_nan && std::isnan(value) && std::isnan(wanted)) continue;
      FAIL() << what << " is " << value << " instead of " << wanted << " at " << i;
    }
    FAIL() << what << " is " << load_integer(dtype, got.data(), i) << " instead of "
           << load_integer(dtype, expected.data(), i) << " at " << i;
  }
}

// Arrays that break kernels, by kind.
inline constexpr int kNumKinds = 10;
inline std::vector<float> values_of_kind(int kind, DType dtype, size_t numel, uint64_t seed) {
  const double largest = dtype == DType::kF32 ? std::numeric_limits<float>::max() : half_format(dtype).largest;
  std::mt19937_64 random(seed);
  std::vector<float> values = kind == 1 ? random_finite_bits(dtype, numel, seed) : random_values(dtype, numel, seed);
  for (size_t i = 0; i < numel; ++i) {
    float& value = values[i];
    if (kind == 2) value = -0.0f;
    if (kind == 3) value = -1.5f;
    if (kind == 4 && i == numel / 2) value = std::nanf("");
    if (kind == 5 && i == numel - 1) value = -HUGE_VALF;
    if (kind == 6)
      value = static_cast<float>(static_cast<int>(random() % 41) - 20) * (dtype == DType::kF16 ? 0x1p-24f : 0x1p-133f);
    if (kind == 7) value = random() % 2 ? 0.0f : -0.0f;
    if (kind == 8) value = static_cast<float>(static_cast<int>(random() % 7) - 3);
    if (kind == 9) value = static_cast<float>(random() % 2 ? largest : -largest);
  }
  return values;
}

}  // namespace bagua::testing

// The elementwise CUDA kernels, on fibres: bit for bit what the CPU's give, over types, sizes, misalignments and
// numbers of arrays, between pages that fault; how all kernels are launched, and on which device.
#include <cmath>
#include <functional>
#include <memory>

#include "csrc/kernels/adam.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/copy_segments.h"
#include "csrc/kernels/copy_to_cold.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/half_codec.h"
#include "csrc/kernels/reduce.h"
#include "csrc/kernels/subtract.h"
#include "csrc/kernels/weighted_sum.h"
#include "csrc/tests/test_kernels_cuda.h"

#define cuda cuda_on_fibres
#include "csrc/kernels/cuda/adam.cu"
#include "csrc/kernels/cuda/cast.cu"
#include "csrc/kernels/cuda/copy_segments.cu"
#include "csrc/kernels/cuda/copy_to_cold.cu"
#include "csrc/kernels/cuda/digest.cu"
#include "csrc/kernels/cuda/half_codec.cu"
#include "csrc/kernels/cuda/reduce.cu"
#include "csrc/kernels/cuda/subtract.cu"
#include "csrc/kernels/cuda/weighted_sum.cu"
#undef cuda

namespace bagua {
namespace {

using cuda_emulation::counters;
using kernels::Residual;
using testing::expect_bits;
using testing::fill_random;
using testing::GuardedArray;
using testing::kCpu;
using testing::kCudaStream;
using testing::kEncodable;
using testing::kFloats;
using testing::store_integer;

constexpr size_t kSizes[] = {0, 1, 3, 7, 8, 31, 33, 511, 1025, 4096, 4099};

std::vector<uint8_t> random_array(DType dtype, size_t numel, uint64_t seed) {
  std::vector<uint8_t> bytes(numel * item_bytes(dtype));
  fill_random(dtype, bytes.data(), numel, seed);
  return bytes;
}

// Any pattern of bits, NaN of all kinds among them.
std::vector<uint8_t> random_bits(DType dtype, size_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(numel * item_bytes(dtype));
  for (size_t i = 0; i < numel; ++i) {
    uint64_t bits = random();
    if (dtype == DType::kF64 && i % 3) {  // near the numbers that f32 and the 16-bit types hold
      const float narrow = std::bit_cast<float>(static_cast<uint32_t>(bits));
      const double wide = static_cast<double>(narrow) * (1 + 0x1p-40 * static_cast<double>(i % 5));
      bits = std::bit_cast<uint64_t>(std::isnan(narrow) ? std::bit_cast<double>(bits | uint64_t{0x7ff} << 52) : wide);
    }
    store_integer(dtype, bytes.data(), i, static_cast<int64_t>(dtype == DType::kBool ? bits & 1 : bits));
  }
  return bytes;
}

struct DeviceArray : GuardedArray {
  DeviceArray(const std::vector<uint8_t>& content, size_t skew) : GuardedArray(content.size(), skew) {
    assign(content.data());
  }
};

class CudaElementwise : public ::testing::Test {
 protected:
  void SetUp() override { BAGUA_SKIP_WITHOUT_FIBRES(); }
};

TEST_F(CudaElementwise, CastsAreTheCpus) {
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      for (size_t numel : kSizes) {
        for (size_t skew : {0, 1, 2}) {
          SCOPED_TRACE(std::string(dtype_name(from)) + " to " + std::string(dtype_name(to)) + " " +
                       std::to_string(numel) + " skew " + std::to_string(skew));
          // Only the 16-bit types may have any alignment.
          const auto skew_of = [&](DType dtype) {
            return item_bytes(dtype) == 2 ? skew : skew * item_bytes(dtype) % 16;
          };
          const std::vector<uint8_t> source = random_bits(from, numel, numel + skew);
          std::vector<uint8_t> expected(numel * item_bytes(to));
          kernels::cast(from, source.data(), to, expected.data(), numel, kCpu);
          DeviceArray device_source(source, skew_of(from));
          GuardedArray got(expected.size(), skew_of(to));
          kernels::cuda_on_fibres::cast(from, device_source.data(), to, got.data(), numel, kCudaStream);
          ASSERT_NO_FATAL_FAILURE(expect_bits(to, got, expected, false, "a number"));
          if (from == DType::kF64 || to != DType::kF32) continue;
          std::vector<uint8_t> sums = random_array(to, numel, 9);
          DeviceArray device_sums(sums, 4 * skew);
          kernels::cast_add(from, source.data(), reinterpret_cast<float*>(sums.data()), numel, kCpu);
          kernels::cuda_on_fibres::cast_add(from, device_source.data(), device_sums.as<float>(), numel, kCudaStream);
          ASSERT_NO_FATAL_FAILURE(expect_bits(to, device_sums, sums, true, "a sum"));
        }
      }
    }
  }
}

// A number of sources and destinations, the first of which are the same arrays if `in_place`; one element off if
// `skewed`.
void expect_reduction(ReduceOp op, DType dtype, int num_sources, int num_destinations, size_t numel, bool in_place,
                      bool skewed) {
  SCOPED_TRACE(std::string(reduce_op_name(op)) + " of " + std::to_string(num_sources) + " " +
               std::string(dtype_name(dtype)) + " " + std::to_string(numel));
  std::vector<std::vector<uint8_t>> host_sources;
  std::vector<std::unique_ptr<GuardedArray>> arrays;
  std::vector<const void*> from, device_from;
  std::vector<void*> device_to;
  const size_t skew = skewed ? item_bytes(dtype) : 0;
  for (int s = 0; s < num_sources; ++s) {
    host_sources.push_back(random_array(dtype, numel, static_cast<uint64_t>(s)));
    if (is_floating(dtype) && numel > 2)
      testing::store_real(dtype, host_sources.back().data(), numel - 2, s == 1 ? NAN : -0.0);
    arrays.push_back(std::make_unique<DeviceArray>(host_sources.back(), skew));
    device_from.push_back(arrays.back()->data());
  }
  for (const std::vector<uint8_t>& source : host_sources) from.push_back(source.data());
  for (int d = 0; d < num_destinations; ++d) {
    if (!in_place || d >= num_sources)
      arrays.push_back(std::make_unique<GuardedArray>(numel * item_bytes(dtype), skew));
    device_to.push_back(in_place && d < num_sources ? arrays[static_cast<size_t>(d)]->data() : arrays.back()->data());
  }
  std::vector<uint8_t> expected(numel * item_bytes(dtype));
  void* const to[] = {expected.data()};
  kernels::reduce_many(op, dtype, from.data(), num_sources, to, 1, numel, kCpu);
  kernels::cuda_on_fibres::reduce_many(op, dtype, device_from.data(), num_sources, device_to.data(), num_destinations,
                                       numel, kCudaStream);
  for (const auto& array : arrays) {
    for (const void* destination : device_to) {
      if (array->data() == destination) expect_bits(dtype, *array, expected, true, "a result");
    }
  }
}

TEST_F(CudaElementwise, ReductionsAreTheCpus) {
  size_t turn = 0;
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      if (!is_defined(static_cast<ReduceOp>(o), static_cast<DType>(t))) continue;
      for (int num_sources = 1; num_sources <= 9; ++num_sources, ++turn) {
        const size_t numel = kSizes[turn % std::size(kSizes)];
        expect_reduction(static_cast<ReduceOp>(o), static_cast<DType>(t), num_sources, 1 + static_cast<int>(turn % 3),
                         numel, turn % 2, turn % 4 == 3);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// One pass over all of them, so that sums of 16-bit types are rounded once, and a late source may be the destination.
TEST_F(CudaElementwise, ReductionsOfManyArraysAreTheCpus) {
  for (int num : {kernels::cuda_on_fibres::kFewPointers, kernels::cuda_on_fibres::kFewPointers + 1, 300}) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI32}) {
      expect_reduction(ReduceOp::kSum, dtype, num, 2, 33, true, false);
      expect_reduction(ReduceOp::kMax, dtype, 3, num, 9, false, true);
      std::vector<std::vector<uint8_t>> host_sources;
      std::vector<std::unique_ptr<GuardedArray>> arrays;
      std::vector<const void*> from, device_from;
      for (int s = 0; s < num; ++s) {
        host_sources.push_back(random_array(dtype, 17, static_cast<uint64_t>(s)));
        arrays.push_back(std::make_unique<DeviceArray>(host_sources.back(), 0));
        device_from.push_back(arrays.back()->data());
      }
      for (const std::vector<uint8_t>& source : host_sources) from.push_back(source.data());
      std::vector<uint8_t> expected(17 * item_bytes(dtype));
      void *const to[] = {expected.data()}, *const device_to[] = {arrays.back()->data()};
      kernels::reduce_many(ReduceOp::kSum, dtype, from.data(), num, to, 1, 17, kCpu);
      kernels::cuda_on_fibres::reduce_many(ReduceOp::kSum, dtype, device_from.data(), num, device_to, 1, 17,
                                           kCudaStream);
      ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, *arrays.back(), expected, true, "a sum"));
      if (dtype == DType::kI32) continue;
      arrays.back()->assign(host_sources.back().data());
      const std::vector<double> weights(static_cast<size_t>(num), 1.0 / num);
      kernels::weighted_sum(dtype, from.data(), weights.data(), num, expected.data(), 17, kCpu);
      kernels::cuda_on_fibres::weighted_sum(dtype, device_from.data(), weights.data(), num, arrays.back()->data(), 17,
                                            kCudaStream);
      ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, *arrays.back(), expected, true, "a weighted sum"));
    }
  }
}

TEST_F(CudaElementwise, ReduceIntoAndScaleAreTheCpus) {
  size_t turn = 0;
  for (DType dtype : kFloats) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
      for (size_t numel : kSizes) {
        const size_t skew = turn++ % 2 * item_bytes(dtype);
        std::vector<uint8_t> sums = random_array(dtype, numel, 1);
        const std::vector<uint8_t> source = random_array(dtype, numel, 2);
        DeviceArray device_sums(sums, skew), device_source(source, skew);
        kernels::reduce_into(op, dtype, sums.data(), source.data(), numel, kCpu);
        kernels::cuda_on_fibres::reduce_into(op, dtype, device_sums.data(), device_source.data(), numel, kCudaStream);
        ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, device_sums, sums, true, "a sum"));
        for (double factor : {0.25, 1.0 / 3, 1e-300}) {
          kernels::scale(dtype, sums.data(), factor, numel, kCpu);
          kernels::cuda_on_fibres::scale(dtype, device_sums.data(), factor, numel, kCudaStream);
          ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, device_sums, sums, true, "a product"));
        }
      }
    }
  }
}

TEST_F(CudaElementwise, WeightedSumsAreTheCpus) {
  const double weights[] = {1.0 / 3, 0.5, -2.0, 1e-3, 1.0, 0.1, 0.2};
  size_t turn = 0;
  for (DType dtype : kFloats) {
    for (size_t numel : kSizes) {
      for (int num_sources : {1, 2, 3, 7}) {
        const size_t skew = turn++ % 2 * item_bytes(dtype);
        std::vector<std::vector<uint8_t>> host_sources;
        std::vector<std::unique_ptr<GuardedArray>> arrays;
        std::vector<const void*> from, device_from;
        for (int s = 0; s < num_sources; ++s) {
          host_sources.push_back(random_array(dtype, numel, static_cast<uint64_t>(s)));
          arrays.push_back(std::make_unique<DeviceArray>(host_sources.back(), skew));
          device_from.push_back(arrays.back()->data());
        }
        for (const std::vector<uint8_t>& source : host_sources) from.push_back(source.data());
        std::vector<uint8_t> expected(numel * item_bytes(dtype));
        kernels::weighted_sum(dtype, from.data(), weights, num_sources, expected.data(), numel, kCpu);
        GuardedArray& destination = *arrays.back();  // in place
        kernels::cuda_on_fibres::weighted_sum(dtype, device_from.data(), weights, num_sources, destination.data(),
                                              numel, kCudaStream);
        ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, destination, expected, true, "a weighted sum"));
      }
    }
  }
}

TEST_F(CudaElementwise, SubtractAndCopyAreTheCpus) {
  for (size_t numel : kSizes) {
    for (size_t skew : {0, 4}) {
      std::vector<uint8_t> left = random_array(DType::kF32, numel, 3);
      const std::vector<uint8_t> source = random_array(DType::kF32, numel, 4);
      DeviceArray device_left(left, skew), device_source(source, 0);
      kernels::subtract(reinterpret_cast<float*>(left.data()), reinterpret_cast<const float*>(source.data()), numel,
                        kCpu);
      kernels::cuda_on_fibres::subtract(device_left.as<float>(), device_source.as<float>(), numel, kCudaStream);
      ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_left, left, false, "a difference"));
      kernels::cuda_on_fibres::copy_to_cold(device_left.data(), device_source.data(), source.size(), kCudaStream);
      ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_left, source, false, "a copy"));
    }
  }
}

TEST_F(CudaElementwise, SegmentsAreCopiedInOneLaunch) {
  constexpr size_t kSizesInBytes[] = {1, 0, 5, 16, 4096, 1000, 40000, 3};
  for (size_t skew : {0, 4, 2, 1}) {
    std::vector<std::vector<uint8_t>> expected;
    std::vector<std::unique_ptr<GuardedArray>> from, to;
    std::vector<kernels::CopySegment> segments;
    for (size_t i = 0; i < kernels::kMaxCopySegments; ++i) {
      const size_t num_bytes = kSizesInBytes[i % std::size(kSizesInBytes)];
      const bool is_zero = i % 3 == 2;
      from.push_back(std::make_unique<DeviceArray>(random_bits(DType::kU8, num_bytes, i), i % 2 ? skew : 0));
      to.push_back(std::make_unique<GuardedArray>(num_bytes, i % 5 == 4 ? 0 : skew));
      expected.push_back(is_zero ? std::vector<uint8_t>(num_bytes) : from.back()->copy());
      segments.push_back({to.back()->data(), is_zero ? nullptr : from.back()->data(), num_bytes});
    }
    const size_t num_launches = counters.num_launches;
    kernels::cuda_on_fibres::copy_segments(segments.data(), kernels::kMaxCopySegments, kCudaStream);
    EXPECT_EQ(counters.num_launches - num_launches, 1u);
    for (size_t i = 0; i < to.size(); ++i) {
      ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kU8, *to[i], expected[i], false, "a byte"));
    }
  }
}

// Pieces of several sizes, alignments and numbers of blocks in one launch.
TEST_F(CudaElementwise, DigestsAreTheCpus) {
  const size_t sizes[] = {0, 1, 3, 33, 512, 1023, 1024, 1025, 8200, 65536, 65537, 200000};
  std::vector<std::unique_ptr<DeviceArray>> arrays;
  std::vector<kernels::DigestPiece> pieces;
  for (size_t skew : {0, 1, 2, 4, 8}) {
    for (size_t num_bytes : sizes) {
      arrays.push_back(std::make_unique<DeviceArray>(random_bits(DType::kU8, num_bytes, num_bytes + skew), skew));
      pieces.push_back({arrays.back()->data(), num_bytes});
    }
  }
  std::vector<uint64_t> expected(pieces.size(), 3), got(pieces.size(), 3);
  const size_t num_launches = counters.num_launches;
  kernels::digest(pieces.data(), static_cast<int>(pieces.size()), expected.data(), kCpu);
  kernels::cuda_on_fibres::digest(pieces.data(), static_cast<int>(pieces.size()), got.data(), kCudaStream);
  EXPECT_EQ(counters.num_launches - num_launches, 1u);
  EXPECT_EQ(got, expected);
}

TEST_F(CudaElementwise, HalfCodesAreTheCpus) {
  size_t turn = 0;
  for (DType from : kEncodable) {
    for (DType to : {DType::kF16, DType::kBF16}) {
      for (size_t numel : kSizes) {
        for (size_t skew : {0, 1, 2}) {
          SCOPED_TRACE(std::string(dtype_name(from)) + " to " + std::string(dtype_name(to)) + " " +
                       std::to_string(numel) + " skew " + std::to_string(skew));
          const size_t source_skew = from == DType::kF32 ? 4 * skew : skew;
          const std::vector<uint8_t> source = random_bits(from, numel, ++turn);
          std::vector<uint8_t> codes(2 * numel);
          uint64_t count = 1, device_count = 1;
          DeviceArray device_source(source, source_skew);
          GuardedArray device_codes(codes.size(), skew);
          const int wire = static_cast<int>(to);
          kernels::kHalf.encode(wire, from, source.data(), numel, codes.data(), {}, &count, kCpu);
          kernels::cuda_on_fibres::kHalf.encode(wire, from, device_source.data(), numel, device_codes.data(), {},
                                                &device_count, kCudaStream);
          ASSERT_NO_FATAL_FAILURE(expect_bits(to, device_codes, codes, false, "a code"));
          ASSERT_EQ(device_count, count);

          const DType residual_dtype = turn % 2 ? DType::kF32 : DType::kBF16;
          const std::vector<uint8_t> residual = random_array(residual_dtype, numel, turn);
          std::vector<uint8_t> left(residual.size());
          DeviceArray device_residual(residual, residual_dtype == DType::kF32 ? 4 * skew : skew);
          GuardedArray device_left(residual.size());
          const bool in_place = turn % 3 == 0;
          const GuardedArray& renewed = in_place ? static_cast<GuardedArray&>(device_residual) : device_left;
          kernels::kHalf.encode_with_residual(wire, from, source.data(), {residual.data(), left.data(), residual_dtype},
                                              numel, codes.data(), {}, &count, kCpu);
          kernels::cuda_on_fibres::kHalf.encode_with_residual(
              wire, from, device_source.data(), {device_residual.data(), renewed.data(), residual_dtype}, numel,
              device_codes.data(), {}, &device_count, kCudaStream);
          ASSERT_NO_FATAL_FAILURE(expect_bits(to, device_codes, codes, false, "a code of a total"));
          ASSERT_NO_FATAL_FAILURE(expect_bits(residual_dtype, renewed, left, true, "a residual"));
          ASSERT_EQ(device_count, count);
        }
      }
    }
  }
}

TEST_F(CudaElementwise, ReducedHalfCodesAreTheCpus) {
  size_t turn = 0;
  for (DType to : {DType::kF16, DType::kBF16}) {
    for (size_t numel : kSizes) {
      for (int count = 1; count <= 9; ++count, ++turn) {
        const size_t skew = turn % 3, stride = 2 * numel + (turn % 2 ? 16 - 2 * numel % 16 : skew);
        const double factor = turn % 2 ? 1.0 / count : 1.0;
        std::vector<uint8_t> codes = random_bits(DType::kU8, stride * static_cast<size_t>(count), turn);
        for (int rank = 0; rank < count; ++rank) {
          fill_random(to, codes.data() + stride * static_cast<size_t>(rank), numel, static_cast<uint64_t>(rank));
        }
        if (numel > 0 && turn % 4 == 0) testing::store_real(to, codes.data(), numel / 2, NAN);
        const std::vector<uint8_t> residual = random_array(DType::kF32, numel, turn);
        std::vector<uint8_t> bytes(2 * numel), left(residual.size());
        DeviceArray device_codes(codes, skew), device_residual(residual, 4 * skew);
        GuardedArray device_bytes(bytes.size(), skew), device_left(residual.size());
        uint64_t found = 0, device_found = 0;
        const bool has_residual = turn % 5 != 0 && numel > 0;
        const int wire = static_cast<int>(to);
        kernels::kHalf.reduce_encode(wire, {codes.data(), stride, count}, factor,
                                     has_residual ? Residual{residual.data(), left.data(), DType::kF32} : Residual{},
                                     numel, bytes.data(), {}, &found, kCpu);
        kernels::cuda_on_fibres::kHalf.reduce_encode(
            wire, {device_codes.data(), stride, count}, factor,
            has_residual ? Residual{device_residual.data(), device_left.data(), DType::kF32} : Residual{}, numel,
            device_bytes.data(), {}, &device_found, kCudaStream);
        ASSERT_NO_FATAL_FAILURE(expect_bits(to, device_bytes, bytes, false, "a code"));
        if (has_residual) {
          ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_left, left, true, "a residual"));
        }
        ASSERT_EQ(device_found, found);
      }
    }
  }
}

// Tensors of several sizes in one launch, the last one off by an element.
void expect_adam(DType dtype, int num_tensors, const kernels::AdamOptions& options) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + " x" + std::to_string(num_tensors));
  std::vector<std::vector<uint8_t>> host;
  std::vector<std::unique_ptr<GuardedArray>> device;
  std::vector<kernels::AdamTensor> on_host, on_device;
  for (int t = 0; t < num_tensors; ++t) {
    const size_t numel = kSizes[static_cast<size_t>(t) % std::size(kSizes)];
    for (int a = 0; a < 4; ++a) {
      host.push_back(random_array(dtype, numel, static_cast<uint64_t>(4 * t + a)));
      for (size_t i = 0; a == 3 && i < numel; ++i) {  // v is no less than 0
        const double value = std::fabs(testing::load_real(dtype, host.back().data(), i));
        testing::store_real(dtype, host.back().data(), i, i % 7 == 0 ? 0 : value);
      }
      device.push_back(std::make_unique<DeviceArray>(host.back(), t == num_tensors - 1 ? item_bytes(dtype) : 0));
    }
  }
  for (size_t t = 0; t < static_cast<size_t>(num_tensors); ++t) {
    const double step_size = -0.001 * static_cast<double>(t + 1), correction = 1.0 / static_cast<double>(t + 2);
    const size_t numel = host[4 * t].size() / item_bytes(dtype);
    const auto tensor = [=](auto& arrays, auto at) {
      return kernels::AdamTensor{
          at(arrays[4 * t]), at(arrays[4 * t + 1]), at(arrays[4 * t + 2]), at(arrays[4 * t + 3]), numel, step_size,
          correction};
    };
    on_host.push_back(tensor(host, [](auto& array) { return array.data(); }));
    on_device.push_back(tensor(device, [](auto& array) { return array->data(); }));
  }
  const size_t num_launches = counters.num_launches;
  kernels::adam(dtype, on_host.data(), num_tensors, options, kCpu);
  kernels::cuda_on_fibres::adam(dtype, on_device.data(), num_tensors, options, kCudaStream);
  EXPECT_EQ(counters.num_launches - num_launches, num_tensors > 1 ? 1u : 0u);  // the first tensor is empty
  for (size_t i = 0; i < host.size(); ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, *device[i], host[i], true, "an element"));
  }
}

TEST_F(CudaElementwise, AdamsStepIsTheCpus) {
  for (DType dtype : kFloats) {
    for (bool is_frozen : {false, true}) {
      for (int num_tensors : {1, 11, kernels::kAdamMaxTensors}) {
        ASSERT_NO_FATAL_FAILURE(expect_adam(dtype, num_tensors, {0.9, 0.999, 1e-8, 0.01, is_frozen}));
      }
      ASSERT_NO_FATAL_FAILURE(expect_adam(dtype, 11, {0.3, 0.9, 1e-3, 0, is_frozen}));
    }
  }
}

// Kernels move vectors by these alone, so no test of theirs passes that a GPU would stop at.
TEST_F(CudaElementwise, VectorsThatAreNotAlignedAreRefused) {
  const GuardedArray array(64, 4);
  using kernels::cuda_on_fibres::Elements;
  const std::function<void()> calls[] = {
      [&] {
        Elements<float, 4> elements;
        kernels::cuda_on_fibres::load_vectors(array.as<float>(), elements);
      },
      [&] { kernels::cuda_on_fibres::store_vectors(Elements<double, 4>{}, array.as<double>()); },
      [&] { kernels::cuda_on_fibres::store_vectors(Elements<uint16_t, 2>{}, array.as<uint16_t>() + 1); },
  };
  for (const auto& call : calls) EXPECT_THROW(cuda_emulation::run_grid(1, 32, call), std::logic_error);
}

// A kernel runs in the stream that it was given, on that stream's device, and leaves the thread's current one alone.
TEST_F(CudaElementwise, KernelsRunOnTheDeviceOfTheirStream) {
  float values[8] = {1}, others[8] = {1};
  int queue = 0;
  const Stream third{{DeviceKind::kCuda, 3}, &queue};
  for (int current : {0, 3}) {
    counters.devices = {current};
    const size_t num_launches = counters.num_launches, num_copies = counters.num_copies;
    kernels::cuda_on_fibres::subtract(values, others, 8, third);
    EXPECT_EQ(counters.launched_on, 3);
    EXPECT_EQ(counters.launched_in, &queue);
    EXPECT_EQ(counters.devices, std::vector<int>{current});
    counters.launched_on = -1;
    kernels::cuda_on_fibres::copy_to_cold(values, others, 32, third);
    EXPECT_EQ(counters.launched_on, 3);
    EXPECT_EQ(counters.devices, std::vector<int>{current});
    EXPECT_EQ(counters.num_launches - num_launches, 1u);
    EXPECT_EQ(counters.num_copies - num_copies, 1u);
  }
  counters.devices = {0};
}

TEST_F(CudaElementwise, FailedLaunchesAreErrorsOfTheDevice) {
  float values[8] = {1}, others[8] = {1};
  const std::function<void()> calls[] = {
      [&] { kernels::cuda_on_fibres::subtract(values, others, 8, kCudaStream); },
      [&] { kernels::cuda_on_fibres::copy_to_cold(values, others, 32, kCudaStream); },
      [&] { kernels::cuda_on_fibres::cast(DType::kF32, values, DType::kF32, others, 8, kCudaStream); },
  };
  for (const auto& call : calls) {
    counters.next_error = cudaErrorLaunchFailure;
    try {
      call();
      FAIL() << "expected an Error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDevice);
      EXPECT_NE(std::string(error.what()).find("on cuda:0: unspecified launch failure"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(CudaElementwise, RefusesMoreArraysThanAKernelTakes) {
  float values[4] = {};
  const std::vector<const void*> sources(1025, values);
  const std::vector<double> weights(1025, 1.0);
  void* const destinations[] = {values};
  testing::expect_invalid_argument(
      [&] {
        kernels::cuda_on_fibres::reduce_many(ReduceOp::kSum, DType::kF32, sources.data(), 1025, destinations, 1, 4,
                                             kCudaStream);
      },
      "1025 arrays, expected at most 1024");
  testing::expect_invalid_argument(
      [&] {
        kernels::cuda_on_fibres::weighted_sum(DType::kF32, sources.data(), weights.data(), 1025, values, 4,
                                              kCudaStream);
      },
      "1025 arrays, expected at most 1024");
}

}  // namespace
}  // namespace bagua

// The public kernels: check the arguments once for all backends, then call cpu:: for a CPU stream and cuda:: for a CUDA
// one (backend.h). On the emulated device cpu:: runs in the stream's order, on the host's view of its memory. Nothing
// is computed here.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/error.h"
#include "csrc/device/runtime.h"
#include "csrc/kernels/adam.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/centroid.h"
#include "csrc/kernels/copy_segments.h"
#include "csrc/kernels/copy_to_cold.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/fused.h"
#include "csrc/kernels/half_codec.h"
#include "csrc/kernels/minifloat.h"
#include "csrc/kernels/minmax_uint8.h"
#include "csrc/kernels/nonfinite.h"
#include "csrc/kernels/onebit.h"
#include "csrc/kernels/qsgd.h"
#include "csrc/kernels/reduce.h"
#include "csrc/kernels/subtract.h"
#include "csrc/kernels/topk.h"
#include "csrc/kernels/topk_chunk.h"
#include "csrc/kernels/weighted_sum.h"

namespace bagua::kernels {
namespace {

[[noreturn]] void reject(const std::string& message) { throw Error(ErrorKind::kInvalidArgument, message); }

bool is_half(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

void check_one_of(bool is_member, const char* kernel, const char* argument, DType dtype, const char* expected) {
  if (is_member) return;
  reject(std::string(kernel) + ": " + argument + " is " + std::string(dtype_name(dtype)) + ", expected one of " +
         expected + "; convert the tensor first");
}

void check_codec_dtype(const char* kernel, DType dtype) {
  check_one_of(dtype == DType::kF32 || is_half(dtype), kernel, "dtype", dtype, "float32, float16, bfloat16");
}

void check_defined(const char* kernel, ReduceOp op, DType dtype) {
  if (is_defined(op, dtype)) return;
  const char* advice = is_floating(dtype)      ? "use SUM, AVG, PRODUCT, MIN or MAX"
                       : dtype == DType::kBool ? "use MIN, MAX, BAND, BOR or BXOR, or convert to an integer type"
                                               : "use SUM and divide, or convert to a floating type";
  reject(std::string(kernel) + ": " + std::string(reduce_op_name(op)) + " is not defined for " +
         std::string(dtype_name(dtype)) + "; " + advice);
}

// Put together only where a device counts launches by name.
struct KernelName {
  const char* codec;
  const char* kernel;
  KernelName(const char* codec, const char* kernel = "") : codec(codec), kernel(kernel) {}
  std::string text() const { return std::string(codec) + kernel; }
};

// `on_host(view)` calls cpu::, with view(pointer) for every pointer into the stream's memory; `on_cuda()` calls cuda::.
// Both may run after this has returned, so they hold copies of what they need.
template <typename OnHost, typename OnCuda>
void run(KernelName kernel, Stream stream, OnHost on_host, OnCuda on_cuda) {
  switch (stream.device.kind) {
    case DeviceKind::kCpu: on_host([](auto* pointer) { return pointer; }); return;
    case DeviceKind::kCuda: on_cuda(); return;
    case DeviceKind::kEmulated: break;
  }
  device::Runtime& runtime = device::runtime_of(stream.device);
  runtime.run(stream, kernel.text().c_str(), [on_host = std::move(on_host), &runtime] {
    on_host([&runtime]<typename T>(T* pointer) {
      return pointer == nullptr ? nullptr : static_cast<T*>(runtime.host_address(pointer));
    });
  });
}

void check_residual(const char* kernel, const Residual& residual) {
  if (!residual.is_on()) return;
  check_one_of(residual.dtype == DType::kF32 || residual.dtype == DType::kBF16, kernel, "residual.dtype",
               residual.dtype, "float32, bfloat16");
}

// The residual of no elements may be null.
void check_residual_is_on(const char* kernel, const Residual& residual, size_t numel) {
  if (!residual.is_on() && numel > 0)
    reject(std::string(kernel) + ": residual.out is null, expected memory for the new residual");
  check_residual(kernel, residual);
}

void check_contributions(const char* kernel, const Contributions& contributions) {
  if (contributions.count < 1) {
    reject(std::string(kernel) + ": contributions.count is " + std::to_string(contributions.count) +
           ", expected 1 or more");
  }
}

template <typename View>
Residual viewed(const Residual& residual, View view) {
  return {view(residual.in), view(residual.out), residual.dtype};
}

template <typename View>
Contributions viewed(const Contributions& contributions, View view) {
  return {view(contributions.codes), contributions.stride, contributions.count};
}

// The pointers of an array, each as `view` sees it.
template <typename T, typename View>
std::vector<T*> viewed(const std::vector<T*>& pointers, View view) {
  std::vector<T*> seen;
  seen.reserve(pointers.size());
  for (T* pointer : pointers) seen.push_back(view(pointer));
  return seen;
}

}  // namespace

void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel, Stream stream) {
  check_defined("reduce_into", op, dtype);
  if (numel == 0) return;  // of a part of fewer elements than ranks, whose place may be the end of the memory
  run(
      "reduce_into", stream, [=](auto at) { cpu::reduce_into(op, dtype, at(acc), at(source), numel); },
      [=] { cuda::reduce_into(op, dtype, acc, source, numel, stream); });
}

void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel, Stream stream) {
  check_defined("reduce_many", op, dtype);
  if (num_sources < 1) reject("reduce_many: num_sources is " + std::to_string(num_sources) + ", expected 1 or more");
  if (numel == 0) return;
  if (stream.is_cpu()) return cpu::reduce_many(op, dtype, sources, num_sources, destinations, num_destinations, numel);
  const std::vector<const void*> from(sources, sources + num_sources);
  const std::vector<void*> to(destinations, destinations + num_destinations);
  run(
      "reduce_many", stream,
      [=](auto at) {
        cpu::reduce_many(op, dtype, viewed(from, at).data(), num_sources, viewed(to, at).data(), num_destinations,
                         numel);
      },
      [=] { cuda::reduce_many(op, dtype, sources, num_sources, destinations, num_destinations, numel, stream); });
}

void scale(DType dtype, void* data, double factor, size_t numel, Stream stream) {
  check_one_of(is_floating(dtype), "scale", "dtype", dtype, "float32, float64, float16, bfloat16");
  run(
      "scale", stream, [=](auto at) { cpu::scale(dtype, at(data), factor, numel); },
      [=] { cuda::scale(dtype, data, factor, numel, stream); });
}

void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel, Stream stream) {
  check_one_of(is_floating(dtype), "weighted_sum", "dtype", dtype, "float32, float64, float16, bfloat16");
  if (num_sources < 1) reject("weighted_sum: num_sources is " + std::to_string(num_sources) + ", expected 1 or more");
  if (stream.is_cpu()) return cpu::weighted_sum(dtype, sources, weights, num_sources, destination, numel);
  const std::vector<const void*> from(sources, sources + num_sources);
  const std::vector<double> factors(weights, weights + num_sources);
  run(
      "weighted_sum", stream,
      [=](auto at) {
        cpu::weighted_sum(dtype, viewed(from, at).data(), factors.data(), num_sources, at(destination), numel);
      },
      [=] { cuda::weighted_sum(dtype, sources, weights, num_sources, destination, numel, stream); });
}

void copy_to_cold(void* destination, const void* source, size_t bytes, Stream stream) {
  run(
      "copy_to_cold", stream, [=](auto at) { cpu::copy_to_cold(at(destination), at(source), bytes); },
      [=] { cuda::copy_to_cold(destination, source, bytes, stream); });
}

void copy_segments(const CopySegment* segments, int num_segments, Stream stream) {
  if (stream.is_cpu()) return cpu::copy_segments(segments, num_segments);
  for (int begin = 0; begin < num_segments; begin += kMaxCopySegments) {
    const std::vector<CopySegment> some(segments + begin, segments + std::min(num_segments, begin + kMaxCopySegments));
    const int count = static_cast<int>(some.size());
    run(
        "copy_segments", stream,
        [=](auto at) {
          std::vector<CopySegment> seen = some;
          for (CopySegment& segment : seen) segment = {at(segment.to), at(segment.from), segment.num_bytes};
          cpu::copy_segments(seen.data(), count);
        },
        [=] { cuda::copy_segments(some.data(), count, stream); });
  }
}

void cast(DType from, const void* source, DType to, void* destination, size_t numel, Stream stream) {
  check_one_of(is_floating(from), "cast", "from", from, "float32, float64, float16, bfloat16");
  check_one_of(is_floating(to), "cast", "to", to, "float32, float64, float16, bfloat16");
  run(
      "cast", stream, [=](auto at) { cpu::cast(from, at(source), to, at(destination), numel); },
      [=] { cuda::cast(from, source, to, destination, numel, stream); });
}

void cast_add(DType from, const void* source, float* accumulator, size_t numel, Stream stream) {
  check_one_of(from == DType::kF32 || is_half(from), "cast_add", "from", from, "float32, float16, bfloat16");
  run(
      "cast_add", stream, [=](auto at) { cpu::cast_add(from, at(source), at(accumulator), numel); },
      [=] { cuda::cast_add(from, source, accumulator, numel, stream); });
}

namespace {

// A codec of kernels, and what it takes for its option.
struct BlockCodec {
  const char* name;
  const BlockKernels& on_cpu;
  const BlockKernels& on_cuda;
  size_t block_numel;
  void (*check_option)(int option);
};

void check_k(int k) {
  if (k >= 8 && k <= static_cast<int>(kTopkMaxK) && (k & (k - 1)) == 0) return;
  reject("topk: k is " + std::to_string(k) + ", expected 8, 16, 32, 64, 128 or 256");
}

constexpr BlockCodec kHalfCodec = {"half", cpu::kHalf, cuda::kHalf, 1, [](int dtype) {
                                     check_one_of(is_half(static_cast<DType>(dtype)), "half", "the wire's dtype",
                                                  static_cast<DType>(dtype), "float16, bfloat16");
                                   }};
constexpr BlockCodec kCentroidCodec = {"centroid", cpu::kCentroid, cuda::kCentroid, kBlockNumel, [](int) {}};
constexpr BlockCodec kMinifloatCodec = {
    "minifloat", cpu::kMinifloat, cuda::kMinifloat, kBlockNumel, [](int type) {
      if (type >= 0 && type < kNumMinifloats) return;
      reject("minifloat: type is " + std::to_string(type) + ", expected 0 to " + std::to_string(kNumMinifloats - 1));
    }};
constexpr BlockCodec kMinmaxUint8Codec = {"minmax_uint8", cpu::kMinmaxUint8, cuda::kMinmaxUint8, kBlockNumel,
                                          [](int) {}};
constexpr BlockCodec kOnebitCodec = {"onebit", cpu::kOnebit, cuda::kOnebit, kBlockNumel, [](int) {}};
constexpr BlockCodec kQsgdCodec = {"qsgd", cpu::kQsgd, cuda::kQsgd, kBlockNumel, [](int bits) {
                                     if (bits == 8 || bits == 4 || bits == 2) return;
                                     reject("qsgd: bits is " + std::to_string(bits) + ", expected 8, 4 or 2");
                                   }};
constexpr BlockCodec kTopkCodec = {"topk", cpu::kTopk, cuda::kTopk, kBlockNumel, check_k};
constexpr BlockCodec kTopkChunkCodec = {"topk_chunk", cpu::kTopkChunk, cuda::kTopkChunk, kTopkChunkNumel,
                                        [](int option) { check_k(TopkChunk::of(option).k); }};

void check_first(const BlockCodec& codec, CounterRng rng) {
  if (rng.first % codec.block_numel == 0) return;
  reject(std::string(codec.name) + ": the message begins at element " + std::to_string(rng.first) +
         ", expected a multiple of " + std::to_string(codec.block_numel));
}

template <const BlockCodec& kCodec>
constexpr BlockKernels kDispatched = {
    [](int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
       uint64_t* num_nonfinite, Stream stream) {
      check_codec_dtype(kCodec.name, dtype);
      kCodec.check_option(option);
      check_first(kCodec, rng);
      run(
          {kCodec.name, "_encode"}, stream,
          [=](auto at) {
            kCodec.on_cpu.encode(option, dtype, at(source), numel, at(bytes), rng, at(num_nonfinite), Stream{});
          },
          [=] { kCodec.on_cuda.encode(option, dtype, source, numel, bytes, rng, num_nonfinite, stream); });
    },
    [](int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
      check_codec_dtype(kCodec.name, dtype);
      kCodec.check_option(option);
      run(
          {kCodec.name, "_decode"}, stream,
          [=](auto at) { kCodec.on_cpu.decode(option, dtype, at(bytes), numel, at(destination), Stream{}); },
          [=] { kCodec.on_cuda.decode(option, dtype, bytes, numel, destination, stream); });
    },
    [](int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
      kCodec.check_option(option);
      run(
          {kCodec.name, "_decode_add"}, stream,
          [=](auto at) { kCodec.on_cpu.decode_add(option, at(bytes), numel, at(accumulator), Stream{}); },
          [=] { kCodec.on_cuda.decode_add(option, bytes, numel, accumulator, stream); });
    },
    [](int option, DType dtype, const void* source, const Residual& residual, size_t numel, uint8_t* bytes,
       CounterRng rng, uint64_t* num_nonfinite, Stream stream) {
      check_codec_dtype(kCodec.name, dtype);
      kCodec.check_option(option);
      check_first(kCodec, rng);
      check_residual_is_on(kCodec.name, residual, numel);
      run(
          {kCodec.name, "_encode_with_residual"}, stream,
          [=](auto at) {
            kCodec.on_cpu.encode_with_residual(option, dtype, at(source), viewed(residual, at), numel, at(bytes), rng,
                                               at(num_nonfinite), Stream{});
          },
          [=] {
            kCodec.on_cuda.encode_with_residual(option, dtype, source, residual, numel, bytes, rng, num_nonfinite,
                                                stream);
          });
    },
    [](int option, const Contributions& contributions, double factor, const Residual& residual, size_t numel,
       uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite, Stream stream) {
      kCodec.check_option(option);
      check_first(kCodec, rng);
      check_contributions(kCodec.name, contributions);
      check_residual(kCodec.name, residual);
      run(
          {kCodec.name, "_reduce_encode"}, stream,
          [=](auto at) {
            kCodec.on_cpu.reduce_encode(option, viewed(contributions, at), factor, viewed(residual, at), numel,
                                        at(bytes), rng, at(num_nonfinite), Stream{});
          },
          [=] {
            kCodec.on_cuda.reduce_encode(option, contributions, factor, residual, numel, bytes, rng, num_nonfinite,
                                         stream);
          });
    },
};

}  // namespace

const BlockKernels kCentroid = kDispatched<kCentroidCodec>;
const BlockKernels kHalf = kDispatched<kHalfCodec>;
const BlockKernels kMinifloat = kDispatched<kMinifloatCodec>;
const BlockKernels kMinmaxUint8 = kDispatched<kMinmaxUint8Codec>;
const BlockKernels kOnebit = kDispatched<kOnebitCodec>;
const BlockKernels kQsgd = kDispatched<kQsgdCodec>;
const BlockKernels kTopk = kDispatched<kTopkCodec>;
const BlockKernels kTopkChunk = kDispatched<kTopkChunkCodec>;

void subtract(float* destination, const float* source, size_t numel, Stream stream) {
  run(
      "subtract", stream, [=](auto at) { cpu::subtract(at(destination), at(source), numel); },
      [=] { cuda::subtract(destination, source, numel, stream); });
}

size_t count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride) {
  check_one_of(is_floating(dtype), "count_nonfinite", "dtype", dtype, "float32, float64, float16, bfloat16");
  if (stride == 0) reject("count_nonfinite: stride is 0, expected 1 or more");
  return cpu::count_nonfinite(dtype, data, numel, stride);
}

void digest(const DigestPiece* pieces, int num_pieces, uint64_t* digests, Stream stream) {
  for (int begin = 0; begin < num_pieces; begin += kDigestMaxPieces) {
    const std::vector<DigestPiece> some(pieces + begin, pieces + std::min(num_pieces, begin + kDigestMaxPieces));
    const int count = static_cast<int>(some.size());
    uint64_t* const into = digests + begin;
    run(
        "digest", stream,
        [=](auto at) {
          for (int i = 0; i < count; ++i) at(into)[i] += cpu::digest(at(some[i].data), some[i].num_bytes);
        },
        [=] { cuda::digest(some.data(), count, into, stream); });
  }
}

void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream) {
  check_one_of(is_floating(dtype), "adam", "dtype", dtype, "float32, float64, float16, bfloat16");
  if (stream.is_cpu()) return cpu::adam(dtype, tensors, num_tensors, options);
  for (int begin = 0; begin < num_tensors; begin += kAdamMaxTensors) {
    const int count = std::min(kAdamMaxTensors, num_tensors - begin);
    const std::vector<AdamTensor> some(tensors + begin, tensors + begin + count);
    run(
        "adam", stream,
        [=](auto at) {
          std::vector<AdamTensor> seen = some;
          for (AdamTensor& tensor : seen) {
            for (void** array : {&tensor.parameter, &tensor.grad, &tensor.exp_avg, &tensor.exp_avg_sq}) {
              *array = at(*array);
            }
          }
          cpu::adam(dtype, seen.data(), count, options);
        },
        [=] { cuda::adam(dtype, some.data(), count, options, stream); });
  }
}

}  // namespace bagua::kernels

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
#include "csrc/kernels/copy_segments.h"
#include "csrc/kernels/copy_to_cold.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/fused.h"
#include "csrc/kernels/minmax_uint8.h"
#include "csrc/kernels/nonfinite.h"
#include "csrc/kernels/onebit.h"
#include "csrc/kernels/qsgd.h"
#include "csrc/kernels/reduce.h"
#include "csrc/kernels/saturating_cast.h"
#include "csrc/kernels/subtract.h"
#include "csrc/kernels/topk.h"
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

void check_qsgd_bits(const char* kernel, int bits) {
  if (bits != 8 && bits != 4 && bits != 2) {
    reject(std::string(kernel) + ": bits is " + std::to_string(bits) + ", expected 8, 4 or 2");
  }
}

void check_qsgd_first(const char* kernel, CounterRng rng) {
  if (rng.first % kQsgdBlockNumel != 0) {
    reject(std::string(kernel) + ": the message begins at element " + std::to_string(rng.first) +
           ", expected a multiple of " + std::to_string(kQsgdBlockNumel));
  }
}

void check_topk_k(const char* kernel, int k) {
  if (k < 8 || k > static_cast<int>(kTopkMaxK) || (k & (k - 1)) != 0) {
    reject(std::string(kernel) + ": k is " + std::to_string(k) + ", expected 8, 16, 32, 64, 128 or 256");
  }
}

void check_defined(const char* kernel, ReduceOp op, DType dtype) {
  if (is_defined(op, dtype)) return;
  const char* advice = is_floating(dtype)      ? "use SUM, AVG, PRODUCT, MIN or MAX"
                       : dtype == DType::kBool ? "use MIN, MAX, BAND, BOR or BXOR, or convert to an integer type"
                                               : "use SUM and divide, or convert to a floating type";
  reject(std::string(kernel) + ": " + std::string(reduce_op_name(op)) + " is not defined for " +
         std::string(dtype_name(dtype)) + "; " + advice);
}

// `on_host(view)` calls cpu::, with view(pointer) for every pointer into the stream's memory; `on_cuda()` calls cuda::.
// Both may run after this has returned, so they hold copies of what they need.
template <typename OnHost, typename OnCuda>
void run(const char* kernel, Stream stream, OnHost on_host, OnCuda on_cuda) {
  switch (stream.device.kind) {
    case DeviceKind::kCpu: on_host([](auto* pointer) { return pointer; }); return;
    case DeviceKind::kCuda: on_cuda(); return;
    case DeviceKind::kEmulated: break;
  }
  device::Runtime& runtime = device::runtime_of(stream.device);
  runtime.run(stream, kernel, [on_host = std::move(on_host), &runtime] {
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

// That of no elements may be null.
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

void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel, uint64_t* num_nonfinite,
                     Stream stream) {
  check_codec_dtype("saturating_cast", from);
  check_one_of(is_half(to), "saturating_cast", "to", to, "float16, bfloat16");
  run(
      "saturating_cast", stream,
      [=](auto at) { cpu::saturating_cast(from, at(source), to, at(destination), numel, at(num_nonfinite)); },
      [=] { cuda::saturating_cast(from, source, to, destination, numel, num_nonfinite, stream); });
}

void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite, Stream stream) {
  check_codec_dtype("saturating_cast_with_residual", from);
  check_one_of(is_half(to), "saturating_cast_with_residual", "to", to, "float16, bfloat16");
  check_residual_is_on("saturating_cast_with_residual", residual, numel);
  run(
      "saturating_cast_with_residual", stream,
      [=](auto at) {
        cpu::saturating_cast_with_residual(from, at(source), viewed(residual, at), to, numel, at(bytes),
                                           at(num_nonfinite));
      },
      [=] { cuda::saturating_cast_with_residual(from, source, residual, to, numel, bytes, num_nonfinite, stream); });
}

void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite, Stream stream) {
  check_one_of(is_half(to), "reduce_saturating_cast", "to", to, "float16, bfloat16");
  check_contributions("reduce_saturating_cast", contributions);
  check_residual("reduce_saturating_cast", residual);
  run(
      "reduce_saturating_cast", stream,
      [=](auto at) {
        cpu::reduce_saturating_cast(viewed(contributions, at), factor, viewed(residual, at), to, numel, at(bytes),
                                    at(num_nonfinite));
      },
      [=] { cuda::reduce_saturating_cast(contributions, factor, residual, to, numel, bytes, num_nonfinite, stream); });
}

void minmax_uint8_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                         Stream stream) {
  check_codec_dtype("minmax_uint8_encode", dtype);
  run(
      "minmax_uint8_encode", stream,
      [=](auto at) { cpu::minmax_uint8_encode(dtype, at(source), numel, at(bytes), at(num_nonfinite_blocks)); },
      [=] { cuda::minmax_uint8_encode(dtype, source, numel, bytes, num_nonfinite_blocks, stream); });
}

void minmax_uint8_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  check_codec_dtype("minmax_uint8_decode", dtype);
  run(
      "minmax_uint8_decode", stream,
      [=](auto at) { cpu::minmax_uint8_decode(dtype, at(bytes), numel, at(destination)); },
      [=] { cuda::minmax_uint8_decode(dtype, bytes, numel, destination, stream); });
}

void minmax_uint8_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  run(
      "minmax_uint8_decode_add", stream,
      [=](auto at) { cpu::minmax_uint8_decode_add(at(bytes), numel, at(accumulator)); },
      [=] { cuda::minmax_uint8_decode_add(bytes, numel, accumulator, stream); });
}

void minmax_uint8_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                       uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_codec_dtype("minmax_uint8_encode_with_residual", dtype);
  check_residual_is_on("minmax_uint8_encode_with_residual", residual, numel);
  run(
      "minmax_uint8_encode_with_residual", stream,
      [=](auto at) {
        cpu::minmax_uint8_encode_with_residual(dtype, at(source), viewed(residual, at), numel, at(bytes),
                                               at(num_nonfinite_blocks));
      },
      [=] {
        cuda::minmax_uint8_encode_with_residual(dtype, source, residual, numel, bytes, num_nonfinite_blocks, stream);
      });
}

void minmax_uint8_reduce_encode(const Contributions& contributions, double factor, const Residual& residual,
                                size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_contributions("minmax_uint8_reduce_encode", contributions);
  check_residual("minmax_uint8_reduce_encode", residual);
  run(
      "minmax_uint8_reduce_encode", stream,
      [=](auto at) {
        cpu::minmax_uint8_reduce_encode(viewed(contributions, at), factor, viewed(residual, at), numel, at(bytes),
                                        at(num_nonfinite_blocks));
      },
      [=] {
        cuda::minmax_uint8_reduce_encode(contributions, factor, residual, numel, bytes, num_nonfinite_blocks, stream);
      });
}

void qsgd_encode(int bits, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                 uint64_t* num_nonfinite_blocks, Stream stream) {
  check_codec_dtype("qsgd_encode", dtype);
  check_qsgd_bits("qsgd_encode", bits);
  check_qsgd_first("qsgd_encode", rng);
  run(
      "qsgd_encode", stream,
      [=](auto at) { cpu::qsgd_encode(bits, dtype, at(source), numel, at(bytes), rng, at(num_nonfinite_blocks)); },
      [=] { cuda::qsgd_encode(bits, dtype, source, numel, bytes, rng, num_nonfinite_blocks, stream); });
}

void qsgd_decode(int bits, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  check_codec_dtype("qsgd_decode", dtype);
  check_qsgd_bits("qsgd_decode", bits);
  run(
      "qsgd_decode", stream, [=](auto at) { cpu::qsgd_decode(bits, dtype, at(bytes), numel, at(destination)); },
      [=] { cuda::qsgd_decode(bits, dtype, bytes, numel, destination, stream); });
}

void qsgd_decode_add(int bits, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  check_qsgd_bits("qsgd_decode_add", bits);
  run(
      "qsgd_decode_add", stream, [=](auto at) { cpu::qsgd_decode_add(bits, at(bytes), numel, at(accumulator)); },
      [=] { cuda::qsgd_decode_add(bits, bytes, numel, accumulator, stream); });
}

void qsgd_encode_with_residual(int bits, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_codec_dtype("qsgd_encode_with_residual", dtype);
  check_qsgd_bits("qsgd_encode_with_residual", bits);
  check_qsgd_first("qsgd_encode_with_residual", rng);
  check_residual_is_on("qsgd_encode_with_residual", residual, numel);
  run(
      "qsgd_encode_with_residual", stream,
      [=](auto at) {
        cpu::qsgd_encode_with_residual(bits, dtype, at(source), viewed(residual, at), numel, at(bytes), rng,
                                       at(num_nonfinite_blocks));
      },
      [=] {
        cuda::qsgd_encode_with_residual(bits, dtype, source, residual, numel, bytes, rng, num_nonfinite_blocks, stream);
      });
}

void qsgd_reduce_encode(int bits, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_qsgd_bits("qsgd_reduce_encode", bits);
  check_qsgd_first("qsgd_reduce_encode", rng);
  check_contributions("qsgd_reduce_encode", contributions);
  check_residual("qsgd_reduce_encode", residual);
  run(
      "qsgd_reduce_encode", stream,
      [=](auto at) {
        cpu::qsgd_reduce_encode(bits, viewed(contributions, at), factor, viewed(residual, at), numel, at(bytes), rng,
                                at(num_nonfinite_blocks));
      },
      [=] {
        cuda::qsgd_reduce_encode(bits, contributions, factor, residual, numel, bytes, rng, num_nonfinite_blocks,
                                 stream);
      });
}

void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                   Stream stream) {
  check_codec_dtype("onebit_encode", dtype);
  run(
      "onebit_encode", stream,
      [=](auto at) { cpu::onebit_encode(dtype, at(source), numel, at(bytes), at(num_nonfinite_blocks)); },
      [=] { cuda::onebit_encode(dtype, source, numel, bytes, num_nonfinite_blocks, stream); });
}

void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  check_codec_dtype("onebit_decode", dtype);
  run(
      "onebit_decode", stream, [=](auto at) { cpu::onebit_decode(dtype, at(bytes), numel, at(destination)); },
      [=] { cuda::onebit_decode(dtype, bytes, numel, destination, stream); });
}

void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  run(
      "onebit_decode_add", stream, [=](auto at) { cpu::onebit_decode_add(at(bytes), numel, at(accumulator)); },
      [=] { cuda::onebit_decode_add(bytes, numel, accumulator, stream); });
}

void onebit_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                 uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_codec_dtype("onebit_encode_with_residual", dtype);
  check_residual_is_on("onebit_encode_with_residual", residual, numel);
  run(
      "onebit_encode_with_residual", stream,
      [=](auto at) {
        cpu::onebit_encode_with_residual(dtype, at(source), viewed(residual, at), numel, at(bytes),
                                         at(num_nonfinite_blocks));
      },
      [=] { cuda::onebit_encode_with_residual(dtype, source, residual, numel, bytes, num_nonfinite_blocks, stream); });
}

void onebit_reduce_encode(const Contributions& contributions, double factor, const Residual& residual, size_t numel,
                          uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_contributions("onebit_reduce_encode", contributions);
  check_residual("onebit_reduce_encode", residual);
  run(
      "onebit_reduce_encode", stream,
      [=](auto at) {
        cpu::onebit_reduce_encode(viewed(contributions, at), factor, viewed(residual, at), numel, at(bytes),
                                  at(num_nonfinite_blocks));
      },
      [=] { cuda::onebit_reduce_encode(contributions, factor, residual, numel, bytes, num_nonfinite_blocks, stream); });
}

void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                 Stream stream) {
  check_codec_dtype("topk_encode", dtype);
  check_topk_k("topk_encode", k);
  run(
      "topk_encode", stream,
      [=](auto at) { cpu::topk_encode(k, dtype, at(source), numel, at(bytes), at(num_nonfinite_blocks)); },
      [=] { cuda::topk_encode(k, dtype, source, numel, bytes, num_nonfinite_blocks, stream); });
}

void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  check_codec_dtype("topk_decode", dtype);
  check_topk_k("topk_decode", k);
  run(
      "topk_decode", stream, [=](auto at) { cpu::topk_decode(k, dtype, at(bytes), numel, at(destination)); },
      [=] { cuda::topk_decode(k, dtype, bytes, numel, destination, stream); });
}

void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  check_topk_k("topk_decode_add", k);
  run(
      "topk_decode_add", stream, [=](auto at) { cpu::topk_decode_add(k, at(bytes), numel, at(accumulator)); },
      [=] { cuda::topk_decode_add(k, bytes, numel, accumulator, stream); });
}

void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_codec_dtype("topk_encode_with_residual", dtype);
  check_topk_k("topk_encode_with_residual", k);
  check_residual_is_on("topk_encode_with_residual", residual, numel);
  run(
      "topk_encode_with_residual", stream,
      [=](auto at) {
        cpu::topk_encode_with_residual(k, dtype, at(source), viewed(residual, at), numel, at(bytes),
                                       at(num_nonfinite_blocks));
      },
      [=] { cuda::topk_encode_with_residual(k, dtype, source, residual, numel, bytes, num_nonfinite_blocks, stream); });
}

void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  check_topk_k("topk_reduce_encode", k);
  check_contributions("topk_reduce_encode", contributions);
  check_residual("topk_reduce_encode", residual);
  run(
      "topk_reduce_encode", stream,
      [=](auto at) {
        cpu::topk_reduce_encode(k, viewed(contributions, at), factor, viewed(residual, at), numel, at(bytes),
                                at(num_nonfinite_blocks));
      },
      [=] {
        cuda::topk_reduce_encode(k, contributions, factor, residual, numel, bytes, num_nonfinite_blocks, stream);
      });
}

void subtract(float* destination, const float* source, size_t numel, Stream stream) {
  run(
      "subtract", stream, [=](auto at) { cpu::subtract(at(destination), at(source), numel); },
      [=] { cuda::subtract(destination, source, numel, stream); });
}

void count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride, uint64_t* count, Stream stream) {
  check_one_of(is_floating(dtype), "count_nonfinite", "dtype", dtype, "float32, float64, float16, bfloat16");
  if (stride == 0) reject("count_nonfinite: stride is 0, expected 1 or more");
  run(
      "count_nonfinite", stream, [=](auto at) { *at(count) += cpu::count_nonfinite(dtype, at(data), numel, stride); },
      [=] { cuda::count_nonfinite(dtype, data, numel, stride, count, stream); });
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
          AdamOptions given = options;
          given.grad_scale = at(options.grad_scale);
          given.found_inf = at(options.found_inf);
          cpu::adam(dtype, seen.data(), count, given);
        },
        [=] { cuda::adam(dtype, some.data(), count, options, stream); });
  }
}

}  // namespace bagua::kernels

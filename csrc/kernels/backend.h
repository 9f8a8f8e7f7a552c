// The seam between the public kernels (one header per operation) and the two backends. dispatch.cc checks
// the arguments and calls cpu:: for a CPU stream, cuda:: for a CUDA stream. cpu/*.cc defines the first set;
// cuda/*.cu, or no_cuda/*.cc in a build without CUDA, the second. The contracts are in the public headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/adam.h"
#include "csrc/kernels/copy_segments.h"
#include "csrc/kernels/counter_rng.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels {

namespace cpu {

void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel);
void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel);
void scale(DType dtype, void* data, double factor, size_t numel);
void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel);

void copy_to_cold(void* destination, const void* source, size_t bytes);
void copy_segments(const CopySegment* segments, int num_segments);
void subtract(float* destination, const float* source, size_t numel);
size_t count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride);
uint64_t digest(const void* data, size_t num_bytes);
void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options);
void cast(DType from, const void* source, DType to, void* destination, size_t numel);
void cast_add(DType from, const void* source, float* accumulator, size_t numel);
void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel,
                     uint64_t* num_nonfinite);
void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite);
void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite);

void minmax_uint8_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void minmax_uint8_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination);
void minmax_uint8_decode_add(const uint8_t* bytes, size_t numel, float* accumulator);
void minmax_uint8_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                       uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void minmax_uint8_reduce_encode(const Contributions& contributions, double factor, const Residual& residual,
                                size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks);

void qsgd_encode(int bits, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                 uint64_t* num_nonfinite_blocks);
void qsgd_decode(int bits, DType dtype, const uint8_t* bytes, size_t numel, void* destination);
void qsgd_decode_add(int bits, const uint8_t* bytes, size_t numel, float* accumulator);
void qsgd_encode_with_residual(int bits, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks);
void qsgd_reduce_encode(int bits, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks);

void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination);
void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator);
void onebit_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                 uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void onebit_reduce_encode(const Contributions& contributions, double factor, const Residual& residual, size_t numel,
                          uint8_t* bytes, uint64_t* num_nonfinite_blocks);

void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination);
void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator);
void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, uint64_t* num_nonfinite_blocks);
void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks);

}  // namespace cpu

namespace cuda {

void reduce_into(ReduceOp op, DType dtype, void* acc, const void* source, size_t numel, Stream stream);
void reduce_many(ReduceOp op, DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, size_t numel, Stream stream);
void scale(DType dtype, void* data, double factor, size_t numel, Stream stream);
void weighted_sum(DType dtype, const void* const* sources, const double* weights, int num_sources, void* destination,
                  size_t numel, Stream stream);

void copy_to_cold(void* destination, const void* source, size_t bytes, Stream stream);
void copy_segments(const CopySegment* segments, int num_segments, Stream stream);
void subtract(float* destination, const float* source, size_t numel, Stream stream);
void count_nonfinite(DType dtype, const void* data, size_t numel, size_t stride, uint64_t* count, Stream stream);
void digest(const DigestPiece* pieces, int num_pieces, uint64_t* digests, Stream stream);
void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream);
void cast(DType from, const void* source, DType to, void* destination, size_t numel, Stream stream);
void cast_add(DType from, const void* source, float* accumulator, size_t numel, Stream stream);
void saturating_cast(DType from, const void* source, DType to, void* destination, size_t numel, uint64_t* num_nonfinite,
                     Stream stream);
void saturating_cast_with_residual(DType from, const void* source, const Residual& residual, DType to, size_t numel,
                                   uint8_t* bytes, uint64_t* num_nonfinite, Stream stream);
void reduce_saturating_cast(const Contributions& contributions, double factor, const Residual& residual, DType to,
                            size_t numel, uint8_t* bytes, uint64_t* num_nonfinite, Stream stream);

void minmax_uint8_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                         Stream stream);
void minmax_uint8_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);
void minmax_uint8_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);
void minmax_uint8_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                       uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);
void minmax_uint8_reduce_encode(const Contributions& contributions, double factor, const Residual& residual,
                                size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);

void qsgd_encode(int bits, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                 uint64_t* num_nonfinite_blocks, Stream stream);
void qsgd_decode(int bits, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);
void qsgd_decode_add(int bits, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);
void qsgd_encode_with_residual(int bits, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream);
void qsgd_reduce_encode(int bits, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream);

void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                   Stream stream);
void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);
void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);
void onebit_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                 uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);
void onebit_reduce_encode(const Contributions& contributions, double factor, const Residual& residual, size_t numel,
                          uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);

void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                 Stream stream);
void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);
void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);
void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);
void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream);

}  // namespace cuda

}  // namespace bagua::kernels

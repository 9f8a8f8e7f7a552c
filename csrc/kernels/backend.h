// The seam between the public kernels (one header per operation) and the two backends. dispatch.cc checks
// the arguments and calls cpu:: for a CPU stream, cuda:: for a CUDA stream. cpu/*.cc defines the first set;
// cuda/*.cu, or no_cuda/*.cc in a build without CUDA, the second. The contracts are in the public headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/adam.h"
#include "csrc/kernels/block_kernels.h"
#include "csrc/kernels/copy_segments.h"
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

extern const BlockKernels kCentroid, kHalf, kMinifloat, kMinmaxUint8, kOnebit, kQsgd, kTopk, kTopkChunk;

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
void digest(const DigestPiece* pieces, int num_pieces, uint64_t* digests, Stream stream);
void adam(DType dtype, const AdamTensor* tensors, int num_tensors, const AdamOptions& options, Stream stream);
void cast(DType from, const void* source, DType to, void* destination, size_t numel, Stream stream);
void cast_add(DType from, const void* source, float* accumulator, size_t numel, Stream stream);

extern const BlockKernels kCentroid, kHalf, kMinifloat, kMinmaxUint8, kOnebit, kQsgd, kTopk, kTopkChunk;

}  // namespace cuda

}  // namespace bagua::kernels

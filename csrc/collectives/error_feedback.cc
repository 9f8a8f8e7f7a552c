// Error feedback of one encoding: what it loses is added to what is encoded next. A part of the compressed all_reduce
// and reduce_scatter; on a device one kernel (kernels/fused.h), on the CPU several passes over a tile in its cache.
#include "csrc/collectives/algorithms.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/subtract.h"

namespace bagua::collectives {

kernels::Residual residual_from(const kernels::Residual& residual, size_t begin) {
  if (!residual.is_on()) return {};
  const size_t item = item_bytes(residual.dtype);
  return {at(residual.in, begin, item), at(residual.out, begin, item), residual.dtype};
}

size_t encode_with_residual(const Codec& codec, const void* values, DType dtype, const kernels::Residual& residual,
                            size_t numel, uint8_t* bytes, CounterRng rng, float* totals, float* decoded,
                            Stream stream) {
  if (!stream.is_cpu()) return codec.encode_with_residual(values, dtype, residual, numel, bytes, rng, stream);
  kernels::cast(residual.dtype, residual.in, DType::kF32, totals, numel, stream);
  kernels::cast_add(dtype, values, totals, numel, stream);
  const size_t num_nonfinite_blocks = codec.encode(totals, DType::kF32, numel, bytes, rng, stream);
  codec.decode(bytes, DType::kF32, numel, decoded, stream);
  kernels::subtract(totals, decoded, numel, stream);
  kernels::cast(DType::kF32, totals, residual.dtype, residual.out, numel, stream);
  return num_nonfinite_blocks;
}

}  // namespace bagua::collectives

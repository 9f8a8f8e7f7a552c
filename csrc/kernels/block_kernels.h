// The five kernels of a block-wise codec, as one table per backend. Each codec's header has its wire format, its
// arithmetic and its public table, whose functions check the arguments and call the table of the stream's backend.
//
// The byte side and the f16 and bf16 side have any alignment, f32 is aligned to the element; source and destination do
// not overlap; numel 0 is legal. No allocation, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/counter_rng.h"
#include "csrc/kernels/fused.h"

namespace bagua::kernels {

inline constexpr size_t kBlockNumel = 2048;  // elements of a whole block

// `option` is the codec's: the bits of qsgd, the k of topk, 0 where there is none. dtype is f32, f16 or bf16. The
// encoders add to `num_nonfinite_blocks`, unless it is null, the number of blocks that held a NaN or an Inf; it lives
// where the stream runs (device memory on CUDA). `rng` is read by codecs that round at random; rng.first is a multiple
// of a block's elements.
struct BlockKernels {
  void (*encode)(int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                 uint64_t* num_nonfinite_blocks, Stream stream);
  // f16 and bf16 round the decoded value to nearest even.
  void (*decode)(int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream);
  // accumulator[i] += the decoded f32 value, which is not rounded to the sender's dtype first.
  void (*decode_add)(int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream);
  // The fused forms (fused.h). The residual of the first is on.
  void (*encode_with_residual)(int option, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream);
  void (*reduce_encode)(int option, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream);
};

}  // namespace bagua::kernels

// The arguments of the fused kernels of the codecs, and what these compute. On a device each is one launch, which reads
// its input once and needs no memory of its own; on the CPU it is the same composition, block by block.
//
//   <codec>_encode_with_residual   total = f32(residual.in) + f32(source); bytes = the codes of total;
//                                  residual.out = total - decoded(bytes), in f32, rounded to its type
//   <codec>_reduce_encode          sums = 0, plus what each contribution decodes to, in f32, by rank; where `factor` is
//                                  not 1, sums = f32(sums * factor), the product in f64; then the sums are encoded,
//                                  with the residual if it is on
//
// The sums begin at +0, so they are never -0. A block that holds a NaN or an Inf is marked as the codec marks it, and
// its residual becomes NaN (of fp16 and bf16: NaN or Inf). The residuals are aligned to f32 or, in bf16, not at all;
// they overlap nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/dtype.h"

namespace bagua::kernels {

// Error feedback of one encoding: `in` is added to what is encoded, in f32, and `out`, which may be `in`, becomes what
// the codes do not say. Both as long as what is encoded, f32 or bf16 (rounded to nearest even). Without `in` nothing is
// added; without `out` there is no feedback at all.
struct Residual {
  const void* in = nullptr;
  void* out = nullptr;
  DType dtype = DType::kF32;

  bool is_on() const { return out != nullptr; }
};

// Codes of the same elements from several ranks, by rank: that of rank r begins at codes + r * stride.
struct Contributions {
  const uint8_t* codes = nullptr;
  size_t stride = 0;
  int count = 0;
};

}  // namespace bagua::kernels

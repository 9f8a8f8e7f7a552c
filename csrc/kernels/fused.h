// What the fused kernels of the codecs take: one launch where a CPU runs several kernels tile by tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/dtype.h"

namespace bagua::kernels {

// Error feedback of one encoding: `in` is added to what is encoded, in f32, and `out`, which may be `in`, becomes what
// the codes do not say. Both as long as what is encoded, f32 or bf16 (rounded to nearest even). Null: none.
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

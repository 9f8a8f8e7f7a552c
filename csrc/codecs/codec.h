// A codec maps floats to bytes and back. It is stateless and thread-safe; error feedback lives outside.
//
// Block-wise: a message is ceil(numel / block_numel()) blocks, the scale and the codes of one block stand
// together, and only the last block of a message may be short. Wire size is a pure function of
// (numel, dtype), so receivers post exact sizes, and a message can be cut at multiples of block_numel().
// Finite input decodes to finite output within the codec's bound. A NaN or Inf makes its whole block
// decode to NaN (never to ordinary numbers) and is counted by `encode`. Source and destination must not
// overlap; the byte side has no alignment; numel 0 is legal. The same bytes come out on CPU and CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/common/dtype.h"
#include "csrc/common/stream.h"

namespace bagua {

class Codec {
 public:
  virtual ~Codec() = default;

  virtual std::string_view name() const = 0;
  virtual size_t block_numel() const = 0;
  virtual size_t wire_bytes(size_t numel, DType dtype) const = 0;

  // Returns how many blocks held a NaN or an Inf; 0 on CUDA, where counting would have to wait for the
  // stream and the NaN that comes out of decode is the report. dtype in {f32, f16, bf16}.
  virtual size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, Stream stream) const = 0;
  virtual void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const = 0;
  // accumulator[i] += decoded[i], in f32, fused. `dtype` is the type the sender encoded from.
  virtual void decode_add(const uint8_t* bytes, DType dtype, size_t numel, float* accumulator, Stream stream) const = 0;
};

using CodecFactory = std::function<std::unique_ptr<Codec>()>;

// Called by a static initialiser in each codec's file; a name registered twice is an InternalError.
bool register_codec(std::string_view name, CodecFactory factory);
// The process-wide instance; an unknown name is an InvalidArgument that lists the registered ones.
const Codec& get_codec(std::string_view name);
std::vector<std::string> registered_codecs();

}  // namespace bagua

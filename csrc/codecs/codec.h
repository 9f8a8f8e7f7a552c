// A codec maps floats to bytes and back. It is stateless and thread-safe; error feedback lives outside.
//
// Block-wise: a message is ceil(numel / block_numel()) blocks, the scale and the codes of one block stand
// together, and only the last block of a message may be short. Wire size is a pure function of
// (numel, dtype), so receivers post exact sizes, and a message can be cut at multiples of block_numel().
// A NaN or Inf makes its whole block decode to NaN (never to ordinary numbers) and is counted by `encode`; finite input
// decodes to finite output within the codec's bound. A codec whose blocks are single elements is a cast: what overflows
// becomes Inf, which is counted too, and Inf stays Inf. Source and destination must not
// overlap; the byte side has no alignment; numel 0 is legal. The same bytes come out on CPU and CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/kernels/counter_rng.h"
#include "csrc/kernels/fused.h"

namespace bagua {

class Codec {
 public:
  virtual ~Codec() = default;

  virtual std::string_view name() const = 0;
  // Tells codecs of one name and different options apart: ranks compare it before they communicate. The variants of a
  // name are 0, 1, ..., without a gap.
  virtual int variant() const { return 0; }
  virtual size_t block_numel() const = 0;
  virtual size_t wire_bytes(size_t numel, DType dtype) const = 0;

  // Returns how many blocks held a NaN or an Inf; 0 on CUDA, where counting would have to wait for the
  // stream and the NaN that comes out of decode is the report. dtype in {f32, f16, bf16}. `rng` is where a codec that
  // rounds at random takes its numbers from; `rng.first` is a multiple of block_numel().
  virtual size_t encode(const void* source, DType dtype, size_t numel, uint8_t* bytes, CounterRng rng,
                        Stream stream) const = 0;
  virtual void decode(const uint8_t* bytes, DType dtype, size_t numel, void* destination, Stream stream) const = 0;
  // accumulator[i] += decoded[i], in f32, fused. `dtype` is the type the sender encoded from.
  virtual void decode_add(const uint8_t* bytes, DType dtype, size_t numel, float* accumulator, Stream stream) const = 0;

  // The two steps of a compressed all-reduce, each in one pass (kernels/fused.h says what they compute), with the bits
  // of the functions above in a row. They return what `encode` does.
  //
  // Encodes f32(source) + residual.in and renews the residual, which is on. The codes are those of f32 elements.
  virtual size_t encode_with_residual(const void* source, DType dtype, const kernels::Residual& residual, size_t numel,
                                      uint8_t* bytes, CounterRng rng, Stream stream) const = 0;
  // Sums what the contributions, of `numel` elements each, decode to, times `factor`, and encodes the sums, with the
  // residual if it is on. `sent_dtype` is the type the senders encoded from.
  virtual size_t reduce_encode(const kernels::Contributions& contributions, DType sent_dtype, double factor,
                               const kernels::Residual& residual, size_t numel, uint8_t* bytes, CounterRng rng,
                               Stream stream) const = 0;
};

// The options that follow the name in "qsgd:bits=4".
class CodecOptions {
 public:
  // Throws InvalidArgument for what is not name:option=value,option=value, and for an option given twice.
  explicit CodecOptions(std::string_view spec);

  const std::string& name() const { return name_; }
  // The value of an option that is one of `allowed`, the first of which is the default.
  int one_of(std::string_view option, std::initializer_list<int> allowed);
  // Throws InvalidArgument for an option that was not asked for.
  void check_all_known() const;
  // The specs of all combinations of the options that have been asked for, that of the defaults, the bare name, first.
  std::vector<std::string> all_specs() const;

 private:
  struct Option {
    std::string name;
    std::vector<std::string> allowed;
  };
  std::string name_;
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<Option> known_;
};

using CodecFactory = std::function<std::unique_ptr<Codec>(CodecOptions&)>;

// Called by a static initialiser in each codec's file. The factory throws InvalidArgument for a combination of options
// that it refuses. An InternalError: a name registered twice, more codecs than have numbers, options whose codecs have
// the same variant or one out of range.
bool register_codec(std::string_view name, CodecFactory factory);
// The process-wide instance for a name, or a name with options; an unknown one is an InvalidArgument that lists the
// registered ones.
const Codec& get_codec(std::string_view spec);
std::vector<std::string> registered_codecs();

// The number that stands for a codec and its options in Operation::codec: not 0, and equal on all ranks of one version,
// because it counts the variants of the registered names in their order.
uint8_t codec_number(const Codec& codec);
// "qsgd:bits=4"; with default options the name alone; empty for a number that no codec here has.
std::string codec_spec(uint8_t number);

}  // namespace bagua

// CUDA form of the min-max quantiser (contract: minmax_uint8.h; arithmetic: arithmetic/minmax_uint8.h).
#include "csrc/kernels/minmax_uint8.h"

#include "csrc/kernels/arithmetic/minmax_uint8.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace minmax_uint8 {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::minmax_uint8;

namespace {

template <int kThreads>
struct MinmaxUint8 {
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kNumWarps = kBlockThreads / kWarpNumThreads;
  static constexpr int kNumParts = 1;
  static constexpr float kPadding = 0.0f;

  // Most blocks have an s of 1, and code 0 leads below min or code 255 above max, but not both: the code of 0 was
  // rounded to an integer, which has moved both one way. In a constant block all elements are `least`, which may be
  // NaN.
  enum class Kind : int32_t { kBelow, kAbove, kGeneral, kConstant };
  // `low` is what code 0 leads to, `least` and `most` clamp what is decoded.
  struct alignas(16) Decoder {
    ByteProduct product;  // of a code and the step
    float low, least, most, unscale;
    Kind kind;
  };
  struct Encoding {
    float low[kNumWarps], high[kNumWarps];
    float scale, base, inverse_step, zero_code;  // of Steps; `step`, which takes a division, is for the decoder
    Decoder decoder;
  };
  template <int kQuads>
  struct Codes {
    uint32_t quad[kQuads];
  };

  __device__ __forceinline__ int padded_numel(int numel) const { return numel; }
  __device__ __forceinline__ size_t wire_bytes() const { return kMinmaxUint8HeaderBytes + kBlockNumel; }

  static __device__ __forceinline__ Decoder decoder_of(Header header) {
    // A NaN in either bound, or an Inf, which only a damaged message holds.
    const bool is_finite = header.min - header.min == 0.0f && header.max - header.max == 0.0f;
    Decoder decoder{};
    decoder.kind = Kind::kConstant;
    decoder.least = is_finite ? header.min : kNan;
    if (!is_finite || header.min == header.max) return decoder;
    const Steps steps = steps_of(header);
    decoder.product = ByteProduct(steps.step);
    decoder.low = steps.base - steps.zero_code * steps.step;
    decoder.most = header.max + 0.0f;  // no value is -0.0 where max is: code 255 leads to 0.0 then
    decoder.unscale = steps.unscale;
    const bool is_below = decoder.low < header.min;
    const bool is_above = decoder.low + 255.0f * steps.step > header.max;
    const bool is_general = steps.scale != 1.0f || !decoder.product.is_exact() || (is_below && is_above);
    decoder.kind = is_general ? Kind::kGeneral : is_below ? Kind::kBelow : Kind::kAbove;
    return decoder;
  }
  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const {
    return decoder_of(Header{load_f32(bytes), load_f32(bytes + 4)});
  }
  template <typename Share>
  __device__ __forceinline__ Codes<Share::kQuads> load_codes(const Share& share, const uint8_t* bytes) const {
    Codes<Share::kQuads> codes;
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      codes.quad[q] = load_bytes<Share::kIsWhole>(bytes + kMinmaxUint8HeaderBytes + share.first(q), share.num(q));
    }
    return codes;
  }

  // value_of in few instructions. None of them sees a zero whose sign could differ: see decoder_of.
  template <typename Share, int kQuads, typename Body>
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes<kQuads>& codes,
                                         Body body) const {
    const ByteProduct product = decoder.product;
    const float low = decoder.low, least = decoder.least, most = decoder.most, unscale = decoder.unscale;
    const Kind kind = decoder.kind;
    const auto plain = [&](int i) { return low + product.of(codes.quad[i / kQuadNumel], i % kQuadNumel); };
    if (kind >= Kind::kGeneral) {
#pragma unroll
      for (int i = 0; i < Share::kNumel; ++i) {
        const float code = byte_to_f32(kByteUnitBits, codes.quad[i / kQuadNumel], i % kQuadNumel, 0);
        const float value = (low + code * product.factor) * unscale;
        body(i, kind == Kind::kConstant ? least : lesser(greater(value, least), most));
      }
    } else if (kind == Kind::kBelow) {
#pragma unroll
      for (int i = 0; i < Share::kNumel; ++i) body(i, greater(plain(i), least));
    } else {
#pragma unroll
      for (int i = 0; i < Share::kNumel; ++i) body(i, lesser(plain(i), most));
    }
  }

  // The extremes of the block; all threads call it.
  template <typename Share>
  static __device__ __forceinline__ Header range_of(const Share& share, const float* values, Encoding& encoding) {
    float low = std::bit_cast<float>(kF32Inf), high = -low;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      low = lesser_or_nan(low, share.has(i) ? values[i] : low);
      high = greater_or_nan(high, share.has(i) ? values[i] : high);
    }
    // Integers in the order of the floats, but for NaN, which is above all.
    const int32_t least = __reduce_min_sync(kAllLanes, ordered(std::bit_cast<int32_t>(low)));
    const int32_t most = __reduce_max_sync(kAllLanes, ordered(std::bit_cast<int32_t>(high)));
    if (lane_index() == 0) {
      encoding.low[warp_index()] = std::bit_cast<float>(ordered(least));
      encoding.high[warp_index()] = std::bit_cast<float>(ordered(most));
    }
    __syncthreads();
    low = encoding.low[0];
    high = encoding.high[0];
#pragma unroll
    for (int w = 1; w < kNumWarps; ++w) {
      low = lesser_or_nan(low, encoding.low[w]);
      high = greater_or_nan(high, encoding.high[w]);
    }
    return {low, high};
  }

  template <bool kIsUsual, int kQuads>
  static __device__ __forceinline__ Codes<kQuads> codes_of(const float* values, const Steps& steps) {
    Codes<kQuads> codes;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      uint32_t code[kQuadNumel];
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const float value = values[q * kQuadNumel + i];
        code[i] = kIsUsual ? unclamped_code_word_of<false>(value, steps) : code_word_of<true>(value, steps);
      }
      codes.quad[q] = gather_bytes<0>(code[0], code[1], code[2], code[3]);
    }
    return codes;
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    Header header = range_of(share, values, encoding);
    const bool is_finite =
        absolute(header.min) < std::bit_cast<float>(kF32Inf) && absolute(header.max) < std::bit_cast<float>(kF32Inf);
    if (threadIdx.x == 0) {
      if (!is_finite) header = {kNan, kNan};
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(header.min), 4, bytes);
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(header.max), 4, bytes + 4);
      const Steps steps = steps_of(header);
      encoding.scale = steps.scale;
      encoding.base = steps.base;
      encoding.inverse_step = steps.inverse_step;
      encoding.zero_code = steps.zero_code;
      if constexpr (kDecodes) encoding.decoder = decoder_of(header);
    }
    __syncthreads();
    const Steps steps{encoding.scale, 0.0f, 0.0f, encoding.inverse_step, encoding.base, encoding.zero_code};
    Codes<Share::kQuads> codes{};
    if (is_finite && header.min != header.max) {
      const bool is_usual = steps.scale == 1.0f && !is_above_codes(unclamped_code_word_of<false>(header.max, steps));
      codes = is_usual ? codes_of<true, Share::kQuads>(values, steps) : codes_of<false, Share::kQuads>(values, steps);
    }
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      store_bytes<Share::kIsWhole>(codes.quad[q], share.num(q), bytes + kMinmaxUint8HeaderBytes + share.first(q));
    }
    if constexpr (kDecodes) {
      decode(share, encoding.decoder, codes, [&](int i, float value) { decoded[i] = value; });
    }
    return is_finite;
  }
};

struct Kernels {
  static constexpr const char* kName = "minmax_uint8";
  static constexpr int kReductionResidentThreads = 640, kResidualReductionResidentThreads = kMinResidentThreads;
  template <typename Body>
  static void with_codec(int, CounterRng, Body body) {
    body(MinmaxUint8<128>{});
  }
  template <typename Body>
  static void with_reduction(int, CounterRng, Body body) {
    body(MinmaxUint8<64>{});  // few threads, because a block is at barriers for much of its time
  }
  template <typename Body>
  static void with_residual_reduction(int, CounterRng, Body body) {
    body(MinmaxUint8<64>{});
  }
};

}  // namespace
}  // namespace minmax_uint8

const BlockKernels kMinmaxUint8 = Launching<minmax_uint8::Kernels>::kTable;

}  // namespace bagua::kernels::cuda

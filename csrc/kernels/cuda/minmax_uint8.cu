// CUDA form of the min-max quantiser (contract: minmax_uint8.h; arithmetic: arithmetic/minmax_uint8.h).
#include "csrc/kernels/minmax_uint8.h"

#include <limits>

#include "csrc/kernels/arithmetic/minmax_uint8.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace minmax_uint8 {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::minmax_uint8;

namespace {

struct MinmaxUint8 {
  static constexpr int kNumGroups = 1;
  static constexpr float kPadding = 0.0f;

  struct Decoder {
    Header header;
    Steps steps;
    bool is_constant;  // all elements are min, which may be NaN
  };
  struct Encoding {
    int32_t low[kNumWarps], high[kNumWarps];
    Decoder decoder;
    bool is_finite;
  };
  struct Codes {
    uint32_t quad[kQuads];
  };

  __device__ __forceinline__ int padded_numel(int numel) const { return numel + numel % 2; }
  __device__ __forceinline__ size_t wire_bytes() const { return kMinmaxUint8HeaderBytes + kBlockNumel; }

  static __device__ __forceinline__ Decoder decoder_of(Header header) {
    Decoder decoder{header, {}, header.min == header.max};
    // A NaN in either bound, or an Inf, which only a damaged message holds.
    const bool is_finite = header.min - header.min == 0.0f && header.max - header.max == 0.0f;
    if (!is_finite) decoder = {{kNan, kNan}, {}, true};
    if (!decoder.is_constant) decoder.steps = steps_of(header);
    return decoder;
  }
  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const {
    return decoder_of(Header{load_f32(bytes), load_f32(bytes + 4)});
  }
  __device__ __forceinline__ Codes load_codes(const Share& share, const uint8_t* bytes) const {
    Codes codes;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      codes.quad[q] = load_bytes(bytes + kMinmaxUint8HeaderBytes + share.first[q], share.num[q]);
    }
    return codes;
  }
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes& codes,
                                         float* values) const {
    if (decoder.is_constant) {
#pragma unroll
      for (int i = 0; i < kShareNumel; ++i) values[i] = decoder.header.min;
      return;
    }
    const Steps steps = decoder.steps;
    const Header header = decoder.header;
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      const auto code = static_cast<uint8_t>(codes.quad[i / kQuadNumel] >> (8 * (i % kQuadNumel)));
      values[i] = value_of<true, true, true>(code, steps, header);
    }
  }

  template <bool kDecodes>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
    int32_t low = kMost, high = kLeast;
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      const int32_t key = ordered(std::bit_cast<int32_t>(values[i]));
      if (share.has(i) && key < low) low = key;
      if (share.has(i) && key > high) high = key;
    }
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    if (lane_index() == 0) {
      encoding.low[warp_index()] = low;
      encoding.high[warp_index()] = high;
    }
    __syncthreads();
    if (warp_index() == 0) {
      low = __reduce_min_sync(kAllLanes, encoding.low[lane_index() % kNumWarps]);
      high = __reduce_max_sync(kAllLanes, encoding.high[lane_index() % kNumWarps]);
      if (lane_index() == 0) {
        constexpr auto kInf = static_cast<int32_t>(kF32Inf);
        encoding.is_finite = high < kInf && low > -kInf - 1;  // -kInf - 1 is the image of -Inf
        Header header{std::bit_cast<float>(ordered(low)), std::bit_cast<float>(ordered(high))};
        if (!encoding.is_finite) header = {kNan, kNan};
        store_f32(header.min, bytes);
        store_f32(header.max, bytes + 4);
        encoding.decoder = decoder_of(header);
      }
    }
    __syncthreads();
    Codes codes{};
    if (!encoding.decoder.is_constant) {
      const Steps steps = encoding.decoder.steps;
#pragma unroll
      for (int i = 0; i < kShareNumel; ++i) {
        codes.quad[i / kQuadNumel] |= static_cast<uint32_t>(code_of<true>(values[i], steps)) << (8 * (i % kQuadNumel));
      }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      store_bytes(codes.quad[q], share.num[q], bytes + kMinmaxUint8HeaderBytes + share.first[q]);
    }
    if constexpr (kDecodes) decode(share, encoding.decoder, codes, decoded);
    return encoding.is_finite;
  }
};

}  // namespace
}  // namespace minmax_uint8

void minmax_uint8_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                         Stream stream) {
  launch_encode("minmax_uint8_encode", minmax_uint8::MinmaxUint8{}, dtype, source, numel, bytes, num_nonfinite_blocks,
                stream);
}

void minmax_uint8_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  launch_decode("minmax_uint8_decode", minmax_uint8::MinmaxUint8{}, dtype, bytes, numel, destination, stream);
}

void minmax_uint8_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  launch_decode_add("minmax_uint8_decode_add", minmax_uint8::MinmaxUint8{}, bytes, numel, accumulator, stream);
}

void minmax_uint8_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                       uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_encode_with_residual("minmax_uint8_encode_with_residual", minmax_uint8::MinmaxUint8{}, dtype, source, residual,
                              numel, bytes, num_nonfinite_blocks, stream);
}

void minmax_uint8_reduce_encode(const Contributions& contributions, double factor, const Residual& residual,
                                size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_reduce_encode("minmax_uint8_reduce_encode", minmax_uint8::MinmaxUint8{}, contributions, factor, residual,
                       numel, bytes, num_nonfinite_blocks, stream);
}

}  // namespace bagua::kernels::cuda

// CUDA form of the stochastic quantiser (contract: qsgd.h; arithmetic: arithmetic/qsgd.h). A thread has the two
// elements that a counter draws for: j of a part of the first half, and of the part as far into the second.
#include "csrc/kernels/qsgd.h"

#include "csrc/kernels/arithmetic/qsgd.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace qsgd {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::qsgd;

namespace {

template <int kBits>
struct Qsgd {
  static constexpr int kNumGroups = kBits == 2 ? 2 : 1;
  static constexpr float kPadding = -0.0f;  // not a zero with a sign of its own where all others are -0.0
  static constexpr uint32_t kMask = (1u << kBits) - 1;

  struct Decoder {
    Steps steps;
    bool is_constant;  // all elements are `constant`
    bool is_scaled;    // s is 2^100
    float constant;
  };
  struct Encoding {
    uint32_t largest[kNumWarps], signs[kNumWarps];
    Decoder decoder;
    bool is_finite;
  };
  // Of 8 bits a word per quad. Of fewer one word, as it lies in the message.
  struct Codes {
    uint32_t word[kBits == 8 ? kQuads : 1];
  };

  CounterRng rng;

  __device__ __forceinline__ int padded_numel(int numel) const {
    constexpr int kUnit = kBits == 2 ? 4 : 2;
    return (numel + kUnit - 1) / kUnit * kUnit;
  }
  __device__ __forceinline__ size_t wire_bytes() const { return kQsgdHeaderBytes + kBlockNumel * kBits / 8; }

  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const { return decoder_of(load_f32(bytes)); }
  static __device__ __forceinline__ Decoder decoder_of(float norm) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(norm) & kF32Abs;
    Decoder decoder{
        {}, magnitude >= kF32Inf || magnitude == 0, magnitude < kUnscaledNorm, magnitude == 0 ? norm : kNan};
    if (decoder.is_constant) return decoder;
    norm = std::bit_cast<float>(magnitude);
    decoder.steps = steps_of(decoder.is_scaled ? scale_up(norm) : norm, levels(kBits));
    return decoder;
  }

  __device__ __forceinline__ Codes load_codes(const Share& share, const uint8_t* bytes) const {
    Codes codes;
    if constexpr (kBits == 8) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        codes.word[q] = load_bytes(bytes + kQsgdHeaderBytes + share.first[q], share.num_bytes);
      }
    } else {
      codes.word[0] = load_bytes(bytes + kQsgdHeaderBytes + share.j, share.num_bytes);
    }
    return codes;
  }

  // Where in its byte the code of an element of quad `q` is.
  static __device__ __forceinline__ int shift_of(const Share& share, int q) {
    return kBits == 8 ? 0 : kBits * (share.group + q * kNumGroups);
  }

  __device__ __forceinline__ void decode(const Share& share, const Decoder& decoder, const Codes& codes,
                                         float* values) const {
    if (decoder.is_constant) {
#pragma unroll
      for (int i = 0; i < kShareNumel; ++i) values[i] = decoder.constant;
      return;
    }
    const Steps steps = decoder.steps;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const uint32_t word = codes.word[kBits == 8 ? q : 0] >> shift_of(share, q);
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const auto code = static_cast<int32_t>(word >> (8 * i) & kMask);
        values[q * kQuadNumel + i] = value_of<kBits, true>(code - levels(kBits), steps);
      }
    }
    if (decoder.is_scaled) {
#pragma unroll
      for (int i = 0; i < kShareNumel; ++i) values[i] = scale_down(values[i]);
    }
  }

  __device__ __forceinline__ void store_codes(const Share& share, const Codes& codes, uint8_t* bytes) const {
    if constexpr (kBits == 8) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        store_bytes(codes.word[q], share.num_bytes, bytes + kQsgdHeaderBytes + share.first[q]);
      }
    } else if (share.group == 0) {
      store_bytes(codes.word[0], share.num_bytes, bytes + kQsgdHeaderBytes + share.j);
    }
  }

  template <bool kDecodes>
  __device__ __forceinline__ bool encode(const Share& share, size_t begin, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    uint32_t largest = 0, signs = ~0u;
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
      largest = (bits & kF32Abs) > largest ? bits & kF32Abs : largest;
      signs &= bits;
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    signs = __reduce_and_sync(kAllLanes, signs);
    if (lane_index() == 0) {
      encoding.largest[warp_index()] = largest;
      encoding.signs[warp_index()] = signs;
    }
    __syncthreads();
    if (warp_index() == 0) {
      largest = __reduce_max_sync(kAllLanes, encoding.largest[lane_index() % kNumWarps]);
      signs = __reduce_and_sync(kAllLanes, encoding.signs[lane_index() % kNumWarps]);
      if (lane_index() == 0) {
        encoding.is_finite = largest < kF32Inf;
        const float norm = !encoding.is_finite ? kNan : std::bit_cast<float>(largest == 0 ? signs : largest);
        store_f32(norm, bytes);
        encoding.decoder = decoder_of(norm);
      }
    }
    __syncthreads();
    Codes codes{};
    if (!encoding.decoder.is_constant) {
      const Steps steps = encoding.decoder.steps;
      const bool is_scaled = encoding.decoder.is_scaled;
      const BlockRng block_rng(derive_key(rng.key, (rng.first + begin) / kBlockNumel));
      const uint32_t counter = block_rng.counter(static_cast<uint32_t>(share.first[0]));
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const uint32_t hash = block_rng.hash(counter + static_cast<uint32_t>(i) * BlockRng::kStride);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          float value = values[q * kQuadNumel + i];
          if (is_scaled) value = scale_up(value);
          const uint32_t draw = q == 0 ? BlockRng::first_of(hash) : BlockRng::second_of(hash);
          const uint32_t code = code_of<kBits>(value, draw, steps) & kMask;
          codes.word[kBits == 8 ? q : 0] |= code << (8 * i + shift_of(share, q));
        }
      }
    }
    if constexpr (kNumGroups > 1) codes.word[0] = combine_groups<kNumGroups>(codes.word[0]);
    store_codes(share, codes, bytes);
    if constexpr (kDecodes) decode(share, encoding.decoder, codes, decoded);
    return encoding.is_finite;
  }
};

// Calls body(codec) for the codec of so many bits.
template <typename Body>
void for_bits(int bits, CounterRng rng, Body body) {
  if (bits == 8) return body(Qsgd<8>{rng});
  if (bits == 4) return body(Qsgd<4>{rng});
  body(Qsgd<2>{rng});
}

}  // namespace
}  // namespace qsgd

void qsgd_encode(int bits, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                 uint64_t* num_nonfinite_blocks, Stream stream) {
  qsgd::for_bits(bits, rng, [=](auto codec) {
    launch_encode("qsgd_encode", codec, dtype, source, numel, bytes, num_nonfinite_blocks, stream);
  });
}

void qsgd_decode(int bits, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  qsgd::for_bits(bits, {},
                 [=](auto codec) { launch_decode("qsgd_decode", codec, dtype, bytes, numel, destination, stream); });
}

void qsgd_decode_add(int bits, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  qsgd::for_bits(bits, {},
                 [=](auto codec) { launch_decode_add("qsgd_decode_add", codec, bytes, numel, accumulator, stream); });
}

void qsgd_encode_with_residual(int bits, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream) {
  qsgd::for_bits(bits, rng, [=, &residual](auto codec) {
    launch_encode_with_residual("qsgd_encode_with_residual", codec, dtype, source, residual, numel, bytes,
                                num_nonfinite_blocks, stream);
  });
}

void qsgd_reduce_encode(int bits, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream) {
  qsgd::for_bits(bits, rng, [=, &contributions, &residual](auto codec) {
    launch_reduce_encode("qsgd_reduce_encode", codec, contributions, factor, residual, numel, bytes,
                         num_nonfinite_blocks, stream);
  });
}

}  // namespace bagua::kernels::cuda

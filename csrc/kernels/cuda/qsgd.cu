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

template <int kBits, int kThreads>
struct Qsgd {
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kNumWarps = kBlockThreads / kWarpNumThreads;
  static constexpr int kNumParts = kBits == 8 ? 2 : 8 / kBits;
  static constexpr int kNumPairs = kNumParts / 2;
  static constexpr float kPadding = -0.0f;  // not a zero with a sign of its own where all others are -0.0
  static constexpr int32_t kLevels = levels(kBits);
  static constexpr uint32_t kMask = (1u << kBits) - 1;

  // In most blocks the norm is L * step, rounded, and s is 1: codes are multiplied, and that is all. In a constant
  // block all elements are `constant`.
  enum class Kind : int32_t { kPlain, kApart, kScaled, kConstant };
  struct alignas(16) Decoder {
    Kind kind;
    float step;
    uint32_t norm_bits;  // of norm * s, as in Steps
    uint32_t unit_bits;  // see byte_to_f32
    float constant;
  };
  struct Encoding {
    uint32_t largest[kNumWarps], signs[kNumWarps];
    float units;  // of Steps
    Decoder decoder;
  };
  // The words as they lie in the message: of 8 bits one per quad, of fewer one per run.
  template <typename Share>
  struct Codes {
    static constexpr int kCount = kBits == 8 ? Share::kQuads : Share::kNumRuns;
    uint32_t word[kCount];
  };

  CounterRng rng;

  __device__ __forceinline__ int padded_numel(int numel) const {
    return (numel + kNumParts - 1) / kNumParts * kNumParts;
  }
  __device__ __forceinline__ size_t wire_bytes() const { return kQsgdHeaderBytes + kBlockNumel * kBits / 8; }

  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const { return decoder_of(load_f32(bytes)); }
  static __device__ __forceinline__ Decoder decoder_of(float norm) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(norm) & kF32Abs;
    const bool is_constant = magnitude >= kF32Inf || magnitude == 0, is_scaled = magnitude < kUnscaledNorm;
    if (is_constant) return {Kind::kConstant, 0.0f, 0, kByteUnitBits, magnitude == 0 ? norm : kNan};
    norm = std::bit_cast<float>(magnitude);
    const Steps steps = steps_of(is_scaled ? scale_up(norm) : norm, kLevels);
    const bool is_apart = std::bit_cast<uint32_t>(static_cast<float>(kLevels) * steps.step) != steps.norm_bits;
    const Kind kind = is_scaled ? Kind::kScaled : is_apart ? Kind::kApart : Kind::kPlain;
    return {kind, steps.step, steps.norm_bits, kByteUnitBits, 0.0f};
  }

  // The place of word `index` of the codes in the message, and how many of its bytes there are.
  template <typename Share>
  static __device__ __forceinline__ int place_of(const Share& share, int index) {
    return static_cast<int>(kQsgdHeaderBytes) + (kBits == 8 ? share.first(index) : share.place(index));
  }
  template <typename Share>
  static __device__ __forceinline__ int num_bytes_of(const Share& share, int index) {
    return share.num_bytes(kBits == 8 ? Share::run_of(index) : index);
  }

  template <typename Share>
  __device__ __forceinline__ Codes<Share> load_codes(const Share& share, const uint8_t* bytes) const {
    Codes<Share> codes;
#pragma unroll
    for (int w = 0; w < codes.kCount; ++w) {
      codes.word[w] = load_bytes<Share::kIsWhole>(bytes + place_of(share, w), num_bytes_of(share, w));
    }
    return codes;
  }

  // The codes of quad q, one in each byte.
  template <typename Share>
  static __device__ __forceinline__ uint32_t quad_of(const Codes<Share>& codes, int q) {
    if constexpr (kBits == 8) return codes.word[q];
    return codes.word[Share::run_of(q)] >> (kBits * Share::part_of(q)) & 0x01010101u * kMask;
  }

  // Calls body(i, code) with the code of each element as a number.
  template <typename Share, typename Body>
  static __device__ __forceinline__ void for_codes(const Codes<Share>& codes, uint32_t unit_bits, Body body) {
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      const uint32_t quad = quad_of(codes, q);
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) body(q * kQuadNumel + i, byte_to_f32(unit_bits, quad, i, kLevels));
    }
  }
  // value_of in few instructions.
  template <typename Share, typename Body>
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes<Share>& codes,
                                         Body body) const {
    const Kind kind = decoder.kind;
    const float step = decoder.step;
    if (kind == Kind::kPlain) {
      for_codes(codes, decoder.unit_bits, [&](int i, float code) { body(i, code * step); });
      return;
    }
    const uint32_t norm_bits = decoder.norm_bits;
    const float constant = decoder.constant;
    for_codes(codes, kByteUnitBits, [&](int i, float code) {
      const uint32_t extreme = norm_bits | (std::bit_cast<uint32_t>(code) & ~kF32Abs);
      const float value = absolute(code) == static_cast<float>(kLevels) ? std::bit_cast<float>(extreme) : code * step;
      body(i, kind == Kind::kConstant ? constant : kind == Kind::kScaled ? scale_down(value) : value);
    });
  }

  template <bool kIsScaled, typename Share>
  __device__ __forceinline__ Codes<Share> codes_of(const Share& share, size_t begin, const float* values,
                                                   const Steps& steps) const {
    const BlockRng block_rng(derive_key(rng.key, (rng.first + begin) / kBlockNumel));
    Codes<Share> codes{};
#pragma unroll
    for (int run = 0; run < Share::kNumRuns; ++run) {
#pragma unroll
      for (int pair = 0; pair < kNumPairs; ++pair) {
        const int quads[2] = {run * kNumParts + pair, run * kNumParts + pair + kNumPairs};
        const uint32_t counter = block_rng.counter(static_cast<uint32_t>(share.first(quads[0])));
        uint32_t code[2][kQuadNumel];
#pragma unroll
        for (int i = 0; i < kQuadNumel; ++i) {
          const uint32_t hash = block_rng.hash(counter + static_cast<uint32_t>(i) * BlockRng::kStride);
#pragma unroll
          for (int of = 0; of < 2; ++of) {
            float value = values[quads[of] * kQuadNumel + i];
            if constexpr (kIsScaled) value = scale_up(value);
            const uint32_t draw = of == 0 ? BlockRng::first_of(hash) : BlockRng::second_of(hash);
            code[of][i] = code_of<kBits>(value, draw, steps);
          }
        }
#pragma unroll
        for (int of = 0; of < 2; ++of) {
          const uint32_t quad = gather_bytes<0>(code[of][0], code[of][1], code[of][2], code[of][3]);
          if constexpr (kBits == 8) {
            codes.word[quads[of]] = quad;
          } else {
            codes.word[run] |= (quad & 0x01010101u * kMask) << (kBits * Share::part_of(quads[of]));
          }
        }
      }
    }
    return codes;
  }

  // The bits of the largest magnitude of the block; all threads call it.
  template <typename Share>
  static __device__ __forceinline__ uint32_t largest_of(const float* values, Encoding& encoding) {
    float of_thread = 0.0f;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) of_thread = greater_or_nan(of_thread, absolute(values[i]));
    uint32_t largest = __reduce_max_sync(kAllLanes, std::bit_cast<uint32_t>(of_thread));
    if (lane_index() == 0) encoding.largest[warp_index()] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) largest = encoding.largest[w] > largest ? encoding.largest[w] : largest;
    return largest;
  }
  // The sign that all elements, which are zeros, have; + where they differ.
  template <typename Share>
  static __device__ __forceinline__ uint32_t sign_of_zeros(const float* values, Encoding& encoding) {
    uint32_t signs = ~0u;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) signs &= std::bit_cast<uint32_t>(values[i]);
    signs = __reduce_and_sync(kAllLanes, signs);
    if (lane_index() == 0) encoding.signs[warp_index()] = signs;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) signs &= encoding.signs[w];
    return signs;
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t begin, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    uint32_t norm_bits = largest_of<Share>(values, encoding);
    const bool is_finite = norm_bits < kF32Inf, is_scaled = norm_bits < kUnscaledNorm;
    if (norm_bits == 0) norm_bits = sign_of_zeros<Share>(values, encoding);
    if (threadIdx.x == 0) {
      const float norm = is_finite ? std::bit_cast<float>(norm_bits) : kNan;
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(norm), 4, bytes);
      encoding.units = steps_of(is_scaled ? scale_up(norm) : norm, kLevels).units;
      if constexpr (kDecodes) encoding.decoder = decoder_of(norm);
    }
    __syncthreads();
    Codes<Share> codes{};
    if (is_finite && (norm_bits & kF32Abs) != 0) {
      const Steps steps{encoding.units, 0.0f, 0};
      codes = is_scaled ? codes_of<true>(share, begin, values, steps) : codes_of<false>(share, begin, values, steps);
    }
#pragma unroll
    for (int w = 0; w < codes.kCount; ++w) {
      store_bytes<Share::kIsWhole>(codes.word[w], num_bytes_of(share, w), bytes + place_of(share, w));
    }
    if constexpr (kDecodes) {
      decode(share, encoding.decoder, codes, [&](int i, float value) { decoded[i] = value; });
    }
    return is_finite;
  }
};

// Calls body(codec) for the codec of so many bits.
template <int kThreads, typename Body>
void for_bits(int bits, CounterRng rng, Body body) {
  if (bits == 8) return body(Qsgd<8, kThreads>{rng});
  if (bits == 4) return body(Qsgd<4, kThreads>{rng});
  body(Qsgd<2, kThreads>{rng});
}

struct Kernels {
  static constexpr const char* kName = "qsgd";
  static constexpr int kReductionResidentThreads = 640, kResidualReductionResidentThreads = 768;
  template <typename Body>
  static void with_codec(int bits, CounterRng rng, Body body) {
    for_bits<128>(bits, rng, body);
  }
  template <typename Body>
  static void with_reduction(int bits, CounterRng rng, Body body) {
    for_bits<64>(bits, rng, body);  // fewer threads, because a block is at barriers for much of its time
  }
  template <typename Body>
  static void with_residual_reduction(int bits, CounterRng rng, Body body) {
    for_bits<128>(bits, rng, body);  // with fewer threads ptxas 13.0 spills on sm_100
  }
};

}  // namespace
}  // namespace qsgd

const BlockKernels kQsgd = Launching<qsgd::Kernels>::kTable;

}  // namespace bagua::kernels::cuda

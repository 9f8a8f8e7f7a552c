// CUDA form of the small floats (contract: minifloat.h; arithmetic: arithmetic/minifloat.h).
#include "csrc/kernels/minifloat.h"

#include "csrc/kernels/arithmetic/minifloat.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace minifloat {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::minifloat;

namespace {

template <Minifloat kType, int kThreads>
struct SmallFloat {
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kNumWarps = kBlockThreads / kWarpNumThreads;
  static constexpr int kBits = minifloat_bits(kType), kNumParts = 8 / kBits;
  static constexpr float kPadding = 0.0f;

  // In most blocks the norm is M * step, rounded, and s is 1.
  enum class Kind : int32_t { kPlain, kApart, kScaled, kNan };
  struct alignas(16) Decoder {
    Kind kind;
    float step;
    uint32_t norm_bits;  // of norm * s, as in Steps
  };
  struct Encoding {
    uint32_t largest[kNumWarps];
    float units;  // of Steps
    Decoder decoder;
  };
  // The words as they lie in the message.
  template <typename Share>
  struct Codes {
    uint32_t word[Share::kNumRuns];
  };

  __device__ __forceinline__ int padded_numel(int numel) const {
    return (numel + kNumParts - 1) / kNumParts * kNumParts;
  }
  __device__ __forceinline__ size_t wire_bytes() const { return kMinifloatHeaderBytes + kBlockNumel / kNumParts; }

  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const { return decoder_of(load_f32(bytes)); }
  static __device__ __forceinline__ Decoder decoder_of(float header) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(header) & kF32Abs;
    if (magnitude >= kF32Inf) return {Kind::kNan, 0.0f, 0};
    const bool is_scaled = magnitude < kUnscaledNorm;
    const float norm = std::bit_cast<float>(magnitude);
    const Steps steps = steps_of<kType>(is_scaled ? scale_up(norm) : norm);
    const float most = static_cast<float>(format_of(kType).most) * steps.step;
    const bool is_apart = std::bit_cast<uint32_t>(most) != steps.norm_bits;
    return {is_scaled ? Kind::kScaled : is_apart ? Kind::kApart : Kind::kPlain, steps.step, steps.norm_bits};
  }

  template <typename Share>
  __device__ __forceinline__ Codes<Share> load_codes(const Share& share, const uint8_t* bytes) const {
    Codes<Share> codes;
#pragma unroll
    for (int run = 0; run < Share::kNumRuns; ++run) {
      const uint8_t* from = bytes + kMinifloatHeaderBytes + share.place(run);
      codes.word[run] = load_bytes<Share::kIsWhole>(from, share.num_bytes(run));
    }
    return codes;
  }

  // Calls body(i, code) with the code of each element.
  template <typename Share, typename Body>
  static __device__ __forceinline__ void for_codes(const Codes<Share>& codes, Body body) {
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      const int q = i / kQuadNumel, bit = 8 * (i % kQuadNumel) + kBits * Share::part_of(q);
      body(i, codes.word[Share::run_of(q)] >> bit & ((1u << kBits) - 1));
    }
  }
  template <typename Share, typename Body>
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes<Share>& codes,
                                         Body body) const {
    const Kind kind = decoder.kind;
    const Steps steps{0.0f, decoder.step, decoder.norm_bits};
    if (kind == Kind::kPlain) {
      for_codes<Share>(codes, [&](int i, uint32_t code) { body(i, value_of<kType, false>(code, steps)); });
      return;
    }
    for_codes<Share>(codes, [&](int i, uint32_t code) {
      const float value = value_of<kType, true>(code, steps);
      body(i, kind == Kind::kNan ? kNan : kind == Kind::kScaled ? scale_down(value) : value);
    });
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

  template <bool kIsScaled, typename Share>
  static __device__ __forceinline__ Codes<Share> codes_of(const float* values, const Steps& steps) {
    Codes<Share> codes{};
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      uint32_t code[kQuadNumel];
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const float value = values[q * kQuadNumel + i];
        code[i] = code_of<kType>(kIsScaled ? scale_up(value) : value, steps);
      }
      const uint32_t quad = gather_bytes<0>(code[0], code[1], code[2], code[3]);
      codes.word[Share::run_of(q)] |= quad << (kBits * Share::part_of(q));
    }
    return codes;
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    const uint32_t norm_bits = largest_of<Share>(values, encoding);
    const bool is_finite = norm_bits < kF32Inf, is_scaled = norm_bits < kUnscaledNorm;
    if (threadIdx.x == 0) {
      const float norm = is_finite ? std::bit_cast<float>(norm_bits) : kNan;
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(norm), 4, bytes);
      encoding.units = steps_of<kType>(is_scaled ? scale_up(norm) : norm).units;
      if constexpr (kDecodes) encoding.decoder = decoder_of(norm);
    }
    __syncthreads();
    Codes<Share> codes{};
    if (is_finite) {
      const Steps steps{encoding.units, 0.0f, 0};
      codes = is_scaled ? codes_of<true, Share>(values, steps) : codes_of<false, Share>(values, steps);
    }
#pragma unroll
    for (int run = 0; run < Share::kNumRuns; ++run) {
      uint8_t* to = bytes + kMinifloatHeaderBytes + share.place(run);
      store_bytes<Share::kIsWhole>(codes.word[run], share.num_bytes(run), to);
    }
    if constexpr (kDecodes) {
      decode(share, encoding.decoder, codes, [&](int i, float value) { decoded[i] = value; });
    }
    return is_finite;
  }
};

// Calls body(codec) for the codec of the type.
template <int kThreads, typename Body>
void for_type(int type, Body body) {
  switch (static_cast<Minifloat>(type)) {
    case Minifloat::kE4M3: return body(SmallFloat<Minifloat::kE4M3, kThreads>{});
    case Minifloat::kE5M2: return body(SmallFloat<Minifloat::kE5M2, kThreads>{});
    case Minifloat::kE2M1: return body(SmallFloat<Minifloat::kE2M1, kThreads>{});
    case Minifloat::kE3M0: return body(SmallFloat<Minifloat::kE3M0, kThreads>{});
  }
}

struct Kernels {
  static constexpr const char* kName = "minifloat";
  static constexpr int kReductionResidentThreads = 640, kResidualReductionResidentThreads = kMinResidentThreads;
  template <typename Body>
  static void with_codec(int type, CounterRng, Body body) {
    for_type<128>(type, body);
  }
  template <typename Body>
  static void with_reduction(int type, CounterRng, Body body) {
    for_type<64>(type, body);  // few threads, because a block is at barriers for much of its time
  }
  template <typename Body>
  static void with_residual_reduction(int type, CounterRng, Body body) {
    for_type<64>(type, body);
  }
};

}  // namespace
}  // namespace minifloat

const BlockKernels kMinifloat = Launching<minifloat::Kernels>::kTable;

}  // namespace bagua::kernels::cuda

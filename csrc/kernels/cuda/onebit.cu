// CUDA form of the sign quantiser; contract: onebit.h. The sum of the magnitudes is the contract's, lane by lane: the
// block passes through shared memory, and each of 64 threads adds up one.
#include "csrc/kernels/onebit.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace {

struct Onebit {
  static constexpr int kNumLanes = 64;  // of the sum
  static constexpr int kBlockThreads = kNumLanes;
  static constexpr int kNumParts = 8;
  static constexpr float kPadding = 0.0f;
  static_assert(kNumLanes == 2 * kWarpNumThreads);

  struct Decoder {
    uint32_t scale;  // bits
  };
  struct Encoding {
    alignas(16) float magnitudes[kBlockNumel];
    double upper_sums[kWarpNumThreads];
    Decoder decoder;
  };
  struct Codes {
    uint32_t word;
  };

  __device__ __forceinline__ int padded_numel(int numel) const { return (numel + 7) / 8 * 8; }
  __device__ __forceinline__ size_t wire_bytes() const { return kOnebitHeaderBytes + kBlockNumel / 8; }

  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const {
    const uint32_t magnitude = load_bytes(bytes, 4) & kF32Abs;
    return {magnitude >= kF32Inf ? std::bit_cast<uint32_t>(kNan) : magnitude};
  }
  template <typename Share>
  __device__ __forceinline__ Codes load_codes(const Share& share, const uint8_t* bytes) const {
    return {load_bytes<Share::kIsWhole>(bytes + kOnebitHeaderBytes + share.place(0), share.num_bytes(0))};
  }
  // The bit of the thread's word that is the sign of element i.
  static __device__ __forceinline__ constexpr int bit_of(int i) { return 8 * (i % kQuadNumel) + i / kQuadNumel; }

  template <typename Share, typename Body>
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes& codes, Body body) const {
    const uint32_t scale = decoder.scale;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      body(i, std::bit_cast<float>(scale | (codes.word << (31 - bit_of(i)) & 0x80000000u)));
    }
  }

  // Its sum is in the first thread; all threads call it. A thread adds up its lane.
  static __device__ __forceinline__ double sum_of(const float* magnitudes, int numel, double* upper_sums) {
    double sum = 0;
    for (int i = thread_index(); i < numel; i += kNumLanes) sum += static_cast<double>(magnitudes[i]);
    if (warp_index() == 1) upper_sums[lane_index()] = sum;
    __syncthreads();
    if (warp_index() == 0) {
      sum += upper_sums[lane_index()];
#pragma unroll
      for (int distance = kWarpNumThreads / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(kAllLanes, sum, distance);
      }
    }
    return sum;
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    float largest = 0.0f;
    Codes codes{0};
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      Elements<float, kQuadNumel> magnitudes;
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const float value = values[q * kQuadNumel + i];
        magnitudes.element[i] = absolute(value);
        largest = greater_or_nan(largest, magnitudes.element[i]);
        codes.word |= std::bit_cast<uint32_t>(value) >> 31 << bit_of(q * kQuadNumel + i);
      }
      if constexpr (Share::kIsWhole) {
        store_vectors(magnitudes, encoding.magnitudes + share.first(q));
      } else {
        store(magnitudes, share.num(q), encoding.magnitudes + share.first(q));
      }
    }
    const bool is_finite = !__syncthreads_or(!(largest < std::bit_cast<float>(kF32Inf)));
    if (!is_finite) codes.word = 0;
    store_bytes<Share::kIsWhole>(codes.word, share.num_bytes(0), bytes + kOnebitHeaderBytes + share.place(0));
    const double sum = sum_of(encoding.magnitudes, share.numel(), encoding.upper_sums);
    if (threadIdx.x == 0) {
      const float scale = is_finite ? static_cast<float>(sum / static_cast<double>(share.numel())) : kNan;
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(scale), 4, bytes);
      encoding.decoder.scale = std::bit_cast<uint32_t>(scale);
    }
    if constexpr (kDecodes) {
      __syncthreads();
      decode(share, encoding.decoder, codes, [&](int i, float value) { decoded[i] = value; });
    }
    return is_finite;
  }
};

struct OnebitKernels {
  static constexpr const char* kName = "onebit";
  static constexpr int kReductionResidentThreads = 1024, kResidualReductionResidentThreads = kMinResidentThreads;
  template <typename Body>
  static void with_codec(int, CounterRng, Body body) {
    body(Onebit{});
  }
  template <typename Body>
  static void with_reduction(int, CounterRng, Body body) {
    body(Onebit{});
  }
  template <typename Body>
  static void with_residual_reduction(int, CounterRng, Body body) {
    body(Onebit{});
  }
};

}  // namespace

const BlockKernels kOnebit = Launching<OnebitKernels>::kTable;

}  // namespace bagua::kernels::cuda

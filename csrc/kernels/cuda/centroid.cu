// CUDA form of the quantiser to four centroids; contract: centroid.h. The sums are the contract's, lane by lane: the
// block passes through shared memory, and each of 64 threads adds up one.
#include "csrc/kernels/centroid.h"

#include <limits>

#include "csrc/kernels/arithmetic/centroid.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace centroid {

using namespace kernels::centroid;

namespace {

struct Centroid {
  static constexpr int kNumLanes = 64;  // of a sum
  static constexpr int kBlockThreads = kNumLanes;
  static constexpr int kNumParts = 4;
  static constexpr float kPadding = -std::numeric_limits<float>::infinity();  // whose code is 0
  static constexpr bool kSaturates = true;
  static_assert(kNumLanes == 2 * kWarpNumThreads);

  using Decoder = Levels;
  struct Encoding {
    alignas(16) float values[kBlockNumel];
    double upper_sums[kWarpNumThreads];
    Header header;
    Decoder decoder;
  };
  template <int kRuns>
  struct Codes {
    uint32_t word[kRuns];
  };

  __device__ __forceinline__ int padded_numel(int numel) const { return (numel + 3) / 4 * 4; }
  __device__ __forceinline__ size_t wire_bytes() const { return kCentroidHeaderBytes + kBlockNumel / 4; }

  __device__ __forceinline__ Decoder decoder_of(const uint8_t* bytes) const {
    return levels_of(Header{load_f32(bytes), load_f32(bytes + 4)});
  }
  template <typename Share>
  __device__ __forceinline__ Codes<Share::kNumRuns> load_codes(const Share& share, const uint8_t* bytes) const {
    Codes<Share::kNumRuns> codes;
#pragma unroll
    for (int run = 0; run < Share::kNumRuns; ++run) {
      codes.word[run] =
          load_bytes<Share::kIsWhole>(bytes + kCentroidHeaderBytes + share.place(run), share.num_bytes(run));
    }
    return codes;
  }
  // The lower bit of the code of element i in its word.
  template <typename Share>
  static __device__ __forceinline__ constexpr int bit_of(int i) {
    return 8 * (i % kQuadNumel) + 2 * Share::part_of(i / kQuadNumel);
  }

  template <typename Share, int kRuns, typename Body>
  __device__ __forceinline__ void decode(const Share&, const Decoder& decoder, const Codes<kRuns>& codes,
                                         Body body) const {
    const Levels levels = decoder;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      body(i, value_of(codes.word[Share::run_of(i / kQuadNumel)] >> bit_of<Share>(i), levels));
    }
  }

  // The mean of term(x), in the first thread; all threads call it. A thread adds up its lane.
  template <typename Term>
  static __device__ __forceinline__ double mean_of(Encoding& encoding, int numel, Term term) {
    double sum = -0.0;
    for (int i = thread_index(); i < numel; i += kNumLanes) sum += term(static_cast<double>(encoding.values[i]));
    if (warp_index() == 1) encoding.upper_sums[lane_index()] = sum;
    __syncthreads();
    if (warp_index() == 0) {
      sum += encoding.upper_sums[lane_index()];
#pragma unroll
      for (int distance = kWarpNumThreads / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(kAllLanes, sum, distance);
      }
    }
    return sum / static_cast<double>(numel);
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      if (share.has(i)) largest = greater_or_nan(largest, absolute(values[i]));
    }
    store_share<DType::kF32>(share, values, 0, encoding.values);
    const bool is_finite = !__syncthreads_or(!(largest < std::bit_cast<float>(kF32Inf)));
    const double mean = mean_of(encoding, share.numel(), [](double x) { return x; });
    if (threadIdx.x == 0) encoding.header.mean = is_finite ? static_cast<float>(mean) : kNan;
    __syncthreads();
    const double middle = static_cast<double>(encoding.header.mean);
    const double square = mean_of(encoding, share.numel(), [=](double x) { return (x - middle) * (x - middle); });
    if (threadIdx.x == 0) {
      encoding.header.sigma = is_finite ? static_cast<float>(sqrt(square)) : kNan;
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(encoding.header.mean), 4, bytes);
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(encoding.header.sigma), 4, bytes + 4);
      if constexpr (kDecodes) encoding.decoder = levels_of(encoding.header);
    }
    __syncthreads();
    const Thresholds thresholds = thresholds_of(encoding.header);  // of NaN no element is above any
    Codes<Share::kNumRuns> codes{};
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) {
      codes.word[Share::run_of(i / kQuadNumel)] |= code_of(values[i], thresholds) << bit_of<Share>(i);
    }
#pragma unroll
    for (int run = 0; run < Share::kNumRuns; ++run) {
      store_bytes<Share::kIsWhole>(codes.word[run], share.num_bytes(run),
                                   bytes + kCentroidHeaderBytes + share.place(run));
    }
    if constexpr (kDecodes) {
      decode(share, encoding.decoder, codes, [&](int i, float value) { decoded[i] = value; });
    }
    return is_finite;
  }
};

struct Kernels {
  static constexpr const char* kName = "centroid";
  static constexpr int kReductionResidentThreads = 1024, kResidualReductionResidentThreads = kMinResidentThreads;
  template <typename Body>
  static void with_codec(int, CounterRng, Body body) {
    body(Centroid{});
  }
  template <typename Body>
  static void with_reduction(int, CounterRng, Body body) {
    body(Centroid{});
  }
  template <typename Body>
  static void with_residual_reduction(int, CounterRng, Body body) {
    body(Centroid{});
  }
};

}  // namespace
}  // namespace centroid

const BlockKernels kCentroid = Launching<centroid::Kernels>::kTable;

}  // namespace bagua::kernels::cuda

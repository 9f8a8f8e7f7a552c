// CUDA form of the sign quantiser; contract: onebit.h. The sum of the magnitudes is the contract's, lane by lane: the
// block passes through shared memory, and one warp adds up its 64 lanes, two to a thread.
#include "csrc/kernels/onebit.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace {

struct Onebit {
  static constexpr int kNumGroups = 4;
  static constexpr float kPadding = 0.0f;
  static constexpr int kNumLanes = 64;  // of the sum
  static_assert(kNumLanes == 2 * kWarpNumThreads);

  struct Decoder {
    uint32_t scale;  // bits
  };
  struct Encoding {
    alignas(16) float magnitudes[kBlockNumel];
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
  __device__ __forceinline__ Codes load_codes(const Share& share, const uint8_t* bytes) const {
    return {load_bytes(bytes + kOnebitHeaderBytes + share.j, share.num_bytes)};
  }
  __device__ __forceinline__ void decode(const Share& share, const Decoder& decoder, const Codes& codes,
                                         float* values) const {
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      const int bit = 8 * (i % kQuadNumel) + share.group + i / kQuadNumel * kNumGroups;
      values[i] = std::bit_cast<float>(decoder.scale | (codes.word >> bit & 1u) << 31);
    }
  }

  // By one warp; the mean in its lane 0.
  static __device__ __forceinline__ float mean_of(const float* magnitudes, int numel) {
    double sum = 0, upper = 0;  // of lanes l and l + 32
    for (int i = lane_index(); i < numel; i += kNumLanes) {
      sum += static_cast<double>(magnitudes[i]);
      if (i + kWarpNumThreads < numel) upper += static_cast<double>(magnitudes[i + kWarpNumThreads]);
    }
    sum += upper;
#pragma unroll
    for (int distance = kWarpNumThreads / 2; distance > 0; distance /= 2) {
      sum += __shfl_down_sync(kAllLanes, sum, distance);
    }
    return static_cast<float>(sum / static_cast<double>(numel));
  }

  template <bool kDecodes>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    bool has_nonfinite = false;
    Codes codes{0};
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      Elements<float, kQuadNumel> magnitudes;
#pragma unroll
      for (int i = 0; i < kQuadNumel; ++i) {
        const uint32_t image = std::bit_cast<uint32_t>(values[q * kQuadNumel + i]);
        has_nonfinite |= (image & kF32Abs) >= kF32Inf;
        magnitudes.element[i] = std::bit_cast<float>(image & kF32Abs);
        codes.word |= image >> 31 << (8 * i + share.group + q * kNumGroups);
      }
      store(magnitudes, share.num[q], encoding.magnitudes + share.first[q]);
    }
    codes.word = combine_groups<kNumGroups>(codes.word);
    if (share.group == 0) store_bytes(codes.word, share.num_bytes, bytes + kOnebitHeaderBytes + share.j);
    const bool is_finite = !__syncthreads_or(has_nonfinite);
    if (warp_index() == 0) {
      const float mean = mean_of(encoding.magnitudes, share.numel);
      if (lane_index() == 0) {
        const float scale = is_finite ? mean : kNan;
        store_f32(scale, bytes);
        encoding.decoder.scale = std::bit_cast<uint32_t>(scale);
      }
    }
    if constexpr (kDecodes) {
      __syncthreads();
      decode(share, encoding.decoder, codes, decoded);
    }
    return is_finite;
  }
};

}  // namespace

void onebit_encode(DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                   Stream stream) {
  launch_encode("onebit_encode", Onebit{}, dtype, source, numel, bytes, num_nonfinite_blocks, stream);
}

void onebit_decode(DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  launch_decode("onebit_decode", Onebit{}, dtype, bytes, numel, destination, stream);
}

void onebit_decode_add(const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  launch_decode_add("onebit_decode_add", Onebit{}, bytes, numel, accumulator, stream);
}

void onebit_encode_with_residual(DType dtype, const void* source, const Residual& residual, size_t numel,
                                 uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_encode_with_residual("onebit_encode_with_residual", Onebit{}, dtype, source, residual, numel, bytes,
                              num_nonfinite_blocks, stream);
}

void onebit_reduce_encode(const Contributions& contributions, double factor, const Residual& residual, size_t numel,
                          uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_reduce_encode("onebit_reduce_encode", Onebit{}, contributions, factor, residual, numel, bytes,
                       num_nonfinite_blocks, stream);
}

}  // namespace bagua::kernels::cuda

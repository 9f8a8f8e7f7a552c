// What the block-wise codecs share on CUDA: one thread block per block of the message, 8 elements per thread, which
// stay in registers from the first pass over them (range, scale) to the last (codes, residual). What happens within a
// block is in the file of each codec, as a `Codec`, passed by value:
//
//   static constexpr int kNumGroups          see Share
//   int padded_numel(int numel) const        elements of a block, rounded up to what its codes hold
//   size_t wire_bytes() const                of a whole block
//   static constexpr float kPadding          what an element that is not there counts as
//   struct Encoding                          what the threads share while they encode
//   template <bool kDecodes> bool encode(const Share&, size_t begin, const float* values, uint8_t* bytes, Encoding&,
//                                        float* decoded) const
//                                            whether the block is finite; `begin` is the message's element at which it
//                                            begins; `decoded` is what the codes say, unless !kDecodes
//   struct Decoder                           what an element needs to be decoded, made by one thread
//   Decoder decoder_of(const uint8_t* bytes) const
//   struct Codes                             those of the thread's elements
//   Codes load_codes(const Share&, const uint8_t* bytes) const
//   void decode(const Share&, const Decoder&, const Codes&, float* values) const
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "csrc/kernels/cuda/elementwise.h"
#include "csrc/kernels/cuda/factor.h"
#include "csrc/kernels/cuda/residual.h"

namespace bagua::kernels::cuda {

inline constexpr int kBlockNumel = 2048;
inline constexpr int kQuadNumel = 4;
inline constexpr int kQuads = 2;
inline constexpr int kShareNumel = kQuads * kQuadNumel;
static_assert(kNumThreads * kShareNumel == kBlockNumel);

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Which elements of a block a thread has: two quads of consecutive ones.
//
// Codes of less than a byte are packed across a block: with 2 * kNumGroups parts of equal length, byte j holds the
// codes of element j of every part. So the lanes of a warp fall into kNumGroups groups; group g has the quads at j of
// the parts g and g + kNumGroups, and lanes that are at one place in their groups have codes for the same four bytes.
// All lanes of a group read consecutive quads.
struct Share {
  int numel;       // of the block
  int part_numel;  // of a part
  int j;           // where the quads begin in their parts
  int group;
  int first[kQuads];  // where they begin in the block
  int num[kQuads];    // how many of their elements there are
  int num_bytes;      // how many of the bytes j .. j + 3 there are

  __device__ __forceinline__ bool has(int i) const { return i % kQuadNumel < num[i / kQuadNumel]; }
};

template <int kNumGroups>
__device__ __forceinline__ Share share_of(int numel, int padded_numel) {
  constexpr int kGroupNumThreads = kWarpNumThreads / kNumGroups;
  Share share;
  share.numel = numel;
  share.part_numel = padded_numel / (kQuads * kNumGroups);
  share.group = lane_index() / kGroupNumThreads;
  share.j = (warp_index() * kGroupNumThreads + lane_index() % kGroupNumThreads) * kQuadNumel;
  const int left = share.part_numel - share.j;
  share.num_bytes = left < 0 ? 0 : left < kQuadNumel ? left : kQuadNumel;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    share.first[q] = (share.group + q * kNumGroups) * share.part_numel + share.j;
    const int there = numel - share.first[q];
    share.num[q] = there < 0 ? 0 : there < share.num_bytes ? there : share.num_bytes;
  }
  return share;
}

// The bits that the lanes of all groups have for the same four bytes.
template <int kNumGroups>
__device__ __forceinline__ uint32_t combine_groups(uint32_t bits) {
#pragma unroll
  for (int distance = kWarpNumThreads / kNumGroups; distance < kWarpNumThreads; distance *= 2) {
    bits |= __shfl_xor_sync(kAllLanes, bits, distance);
  }
  return bits;
}

template <DType kDType>
__device__ __forceinline__ void load_share(const Share& share, const void* source, size_t begin, float padding,
                                           float* values) {
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    load_f32<kDType, kQuadNumel>(source, begin + static_cast<size_t>(share.first[q]), share.num[q], padding,
                                 values + q * kQuadNumel);
  }
}
template <DType kDType>
__device__ __forceinline__ void store_share(const Share& share, const float* values, size_t begin, void* destination) {
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    store_f32<kDType, kQuadNumel>(values + q * kQuadNumel, begin + static_cast<size_t>(share.first[q]), share.num[q],
                                  destination);
  }
}

// The block of the message that the thread block is for.
struct Block {
  size_t begin;
  int numel;
  size_t offset_bytes;
};

template <typename Codec>
__device__ __forceinline__ Block current_block(const Codec& codec, size_t numel) {
  const size_t begin = static_cast<size_t>(blockIdx.x) * kBlockNumel;
  const size_t left = numel - begin;
  return {begin, left < kBlockNumel ? static_cast<int>(left) : kBlockNumel, blockIdx.x * codec.wire_bytes()};
}

template <typename Codec>
__device__ __forceinline__ Share share_of(const Codec& codec, const Block& block) {
  return share_of<Codec::kNumGroups>(block.numel, codec.padded_numel(block.numel));
}

__device__ __forceinline__ void count_block(bool is_finite, uint64_t* num_nonfinite_blocks) {
  if (is_finite || num_nonfinite_blocks == nullptr || threadIdx.x != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(num_nonfinite_blocks), 1ull);
}

template <typename Codec, DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    encode_kernel(Codec codec, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& encoding = shared_memory<typename Codec::Encoding>();
  const Block block = current_block(codec, numel);
  const Share share = share_of(codec, block);
  float values[kShareNumel];
  load_share<kDType>(share, source, block.begin, Codec::kPadding, values);
  const bool is_finite =
      codec.template encode<false>(share, block.begin, values, bytes + block.offset_bytes, encoding, nullptr);
  count_block(is_finite, num_nonfinite_blocks);
}

// Adds the residual to the values, encodes them and renews the residual.
template <typename Codec>
__device__ __forceinline__ bool encode_with_residual(const Codec& codec, const Block& block, const Share& share,
                                                     float* values, const Residual& residual, uint8_t* bytes,
                                                     typename Codec::Encoding& encoding) {
  float decoded[kShareNumel];
  const bool is_finite =
      codec.template encode<true>(share, block.begin, values, bytes + block.offset_bytes, encoding, decoded);
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) decoded[i] = values[i] - decoded[i];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    store_residual<kQuadNumel>(decoded + q * kQuadNumel, residual, block.begin + static_cast<size_t>(share.first[q]),
                               share.num[q]);
  }
  return is_finite;
}

__device__ __forceinline__ void add_residual(const Share& share, const Residual& residual, size_t begin,
                                             float* values) {
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    add_residual<kQuadNumel>(residual, begin + static_cast<size_t>(share.first[q]), share.num[q],
                             values + q * kQuadNumel);
  }
}

template <typename Codec, DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    encode_with_residual_kernel(Codec codec, const void* source, Residual residual, size_t numel, uint8_t* bytes,
                                uint64_t* num_nonfinite_blocks) {
  auto& encoding = shared_memory<typename Codec::Encoding>();
  const Block block = current_block(codec, numel);
  const Share share = share_of(codec, block);
  float values[kShareNumel];
  load_share<kDType>(share, source, block.begin, Codec::kPadding, values);
  add_residual(share, residual, block.begin, values);
  count_block(encode_with_residual(codec, block, share, values, residual, bytes, encoding), num_nonfinite_blocks);
}

template <typename Codec, DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    decode_kernel(Codec codec, const uint8_t* bytes, size_t numel, void* destination) {
  auto& decoder = shared_memory<typename Codec::Decoder>();
  const Block block = current_block(codec, numel);
  const Share share = share_of(codec, block);
  const typename Codec::Codes codes = codec.load_codes(share, bytes + block.offset_bytes);
  if (threadIdx.x == 0) decoder = codec.decoder_of(bytes + block.offset_bytes);
  __syncthreads();
  float values[kShareNumel];
  codec.decode(share, decoder, codes, values);
  store_share<kDType>(share, values, block.begin, destination);
}

template <typename Codec>
__global__ void __launch_bounds__(kNumThreads)
    decode_add_kernel(Codec codec, const uint8_t* bytes, size_t numel, float* accumulator) {
  auto& decoder = shared_memory<typename Codec::Decoder>();
  const Block block = current_block(codec, numel);
  const Share share = share_of(codec, block);
  const typename Codec::Codes codes = codec.load_codes(share, bytes + block.offset_bytes);
  float sums[kShareNumel], values[kShareNumel];
  load_share<DType::kF32>(share, accumulator, block.begin, 0.0f, sums);
  if (threadIdx.x == 0) decoder = codec.decoder_of(bytes + block.offset_bytes);
  __syncthreads();
  codec.decode(share, decoder, codes, values);
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) sums[i] += values[i];
  store_share<DType::kF32>(share, sums, block.begin, accumulator);
}

// So many decoders are made at a time, by as many threads, and the codes of so many contributions are on their way to a
// thread.
inline constexpr int kNumDecoders = kWarpNumThreads;
inline constexpr int kNumAhead = 4;

template <typename Codec>
struct Reducing {
  typename Codec::Decoder decoders[kNumDecoders];
  typename Codec::Encoding encoding;
};

// The sums of what the contributions decode to, by rank, from +0 on; all threads call it.
template <typename Codec>
__device__ __forceinline__ void sum_contributions(const Codec& codec, const Block& block, const Share& share,
                                                  const Contributions& contributions, typename Codec::Decoder* decoders,
                                                  float* sums) {
  const uint8_t* bytes = contributions.codes + block.offset_bytes;
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) sums[i] = 0.0f;
  for (int begin = 0; begin < contributions.count; begin += kNumDecoders) {
    const int left = contributions.count - begin, count = left < kNumDecoders ? left : kNumDecoders;
    if (begin > 0) __syncthreads();  // all have used the decoders before
    if (thread_index() < count) {
      decoders[threadIdx.x] =
          codec.decoder_of(bytes + static_cast<size_t>(begin + thread_index()) * contributions.stride);
    }
    __syncthreads();
    for (int r = 0; r < count; r += kNumAhead) {
      typename Codec::Codes codes[kNumAhead];
#pragma unroll
      for (int a = 0; a < kNumAhead; ++a) {
        if (r + a >= count) continue;
        codes[a] = codec.load_codes(share, bytes + static_cast<size_t>(begin + r + a) * contributions.stride);
      }
#pragma unroll
      for (int a = 0; a < kNumAhead; ++a) {
        if (r + a >= count) continue;
        float values[kShareNumel];
        codec.decode(share, decoders[r + a], codes[a], values);
#pragma unroll
        for (int i = 0; i < kShareNumel; ++i) sums[i] += values[i];
      }
    }
  }
}

// The second half of the reduction: scales the sums and encodes them.
template <typename Codec>
__device__ __forceinline__ bool encode_sums(const Codec& codec, const Block& block, const Share& share, float* sums,
                                            const Factor& factor, const Residual& residual, uint8_t* bytes,
                                            typename Codec::Encoding& encoding) {
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    if (!factor.is_one) sums[i] = factor(sums[i]);
    if (!share.has(i)) sums[i] = Codec::kPadding;
  }
  if (residual.out == nullptr) {
    return codec.template encode<false>(share, block.begin, sums, bytes + block.offset_bytes, encoding, nullptr);
  }
  add_residual(share, residual, block.begin, sums);
  return encode_with_residual(codec, block, share, sums, residual, bytes, encoding);
}

// Four of them on a multiprocessor: 64 registers. ptxas would rather spill a few than go past 48.
template <typename Codec>
__global__ void __launch_bounds__(kNumThreads, 4)
    reduce_encode_kernel(Codec codec, Contributions contributions, Factor factor, Residual residual, size_t numel,
                         uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& shared = shared_memory<Reducing<Codec>>();
  const Block block = current_block(codec, numel);
  const Share share = share_of(codec, block);
  float sums[kShareNumel];
  sum_contributions(codec, block, share, contributions, shared.decoders, sums);
  const bool is_finite = encode_sums(codec, block, share, sums, factor, residual, bytes, shared.encoding);
  count_block(is_finite, num_nonfinite_blocks);
}

template <typename Codec>
void launch_encode(const char* name, const Codec& codec, DType dtype, const void* source, size_t numel, uint8_t* bytes,
                   uint64_t* num_nonfinite_blocks, Stream stream) {
  for_float_type(dtype, [&](auto type) {
    launch(name, stream, ceil_div(numel, kBlockNumel), encode_kernel<Codec, decltype(type)::value>, codec, source,
           numel, bytes, num_nonfinite_blocks);
  });
}

template <typename Codec>
void launch_encode_with_residual(const char* name, const Codec& codec, DType dtype, const void* source,
                                 const Residual& residual, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                                 Stream stream) {
  for_float_type(dtype, [&](auto type) {
    launch(name, stream, ceil_div(numel, kBlockNumel), encode_with_residual_kernel<Codec, decltype(type)::value>, codec,
           source, residual, numel, bytes, num_nonfinite_blocks);
  });
}

template <typename Codec>
void launch_reduce_encode(const char* name, const Codec& codec, const Contributions& contributions, double factor,
                          const Residual& residual, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                          Stream stream) {
  launch(name, stream, ceil_div(numel, kBlockNumel), reduce_encode_kernel<Codec>, codec, contributions, Factor(factor),
         residual, numel, bytes, num_nonfinite_blocks);
}

template <typename Codec>
void launch_decode(const char* name, const Codec& codec, DType dtype, const uint8_t* bytes, size_t numel,
                   void* destination, Stream stream) {
  for_float_type(dtype, [&](auto type) {
    launch(name, stream, ceil_div(numel, kBlockNumel), decode_kernel<Codec, decltype(type)::value>, codec, bytes, numel,
           destination);
  });
}

template <typename Codec>
void launch_decode_add(const char* name, const Codec& codec, const uint8_t* bytes, size_t numel, float* accumulator,
                       Stream stream) {
  launch(name, stream, ceil_div(numel, kBlockNumel), decode_add_kernel<Codec>, codec, bytes, numel, accumulator);
}

}  // namespace bagua::kernels::cuda

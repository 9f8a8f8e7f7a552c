// The part that the block-wise codecs share on CUDA: one thread block per block of the message, whose elements stay in
// registers from the first pass over them (range, scale) to the last (codes, residual). What happens within a block is
// in the file of each codec, as a `Codec`, passed by value:
//
//   static constexpr int kBlockThreads       of a thread block. Few threads with many elements each: more of a
//                                            multiprocessor's memory traffic is on its way, and what is computed once
//                                            per block delays fewer
//   static constexpr int kNumParts           see Share
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
//   auto load_codes(const Share&, const uint8_t* bytes) const
//                                            those of the thread's elements
//   void decode(const Share&, const Decoder&, codes, body) const
//                                            calls body(i, value) for each of the thread's elements
//   static constexpr bool kSaturates         if there: decoded values may lie beyond the range of what was encoded, and
//                                            are clamped to that of the type they are stored as
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "csrc/kernels/arithmetic/saturate.h"
#include "csrc/kernels/block_kernels.h"
#include "csrc/kernels/cuda/elementwise.h"
#include "csrc/kernels/cuda/factor.h"
#include "csrc/kernels/cuda/instructions.h"
#include "csrc/kernels/cuda/residual.h"

namespace bagua::kernels::cuda {

inline constexpr int kBlockNumel = 2048;
inline constexpr int kQuadNumel = 4;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The elements of a block that a thread has: quads of consecutive ones.
//
// Codes of less than a byte are packed across a block: with kNumParts parts of equal length, byte j holds the codes of
// element j of every part. So a thread has the quads at the same place of all parts, whose codes are the same four
// bytes, in each of kNumRuns runs: neighbouring threads have neighbouring quads, a run follows on the one before.
//
// `kIsWhole`: the block has all of its elements, and all arrays are aligned, so that nothing is asked per quad.
template <typename Codec, bool kWhole>
struct Share {
  static constexpr bool kIsWhole = kWhole;
  static constexpr int kNumParts = Codec::kNumParts;
  static constexpr int kNumel = kBlockNumel / Codec::kBlockThreads;
  static constexpr int kQuads = kNumel / kQuadNumel;
  static constexpr int kNumRuns = kQuads / kNumParts;
  static_assert(kNumRuns * kNumParts * kQuadNumel * Codec::kBlockThreads == kBlockNumel);

  // Quad q is of this part and of this run.
  static __device__ __forceinline__ constexpr int part_of(int q) { return q % kNumParts; }
  static __device__ __forceinline__ constexpr int run_of(int q) { return q / kNumParts; }

  __device__ __forceinline__ Share(const Codec& codec, int numel)
      : numel_(numel), part_numel_(codec.padded_numel(numel) / kNumParts) {}

  __device__ __forceinline__ int numel() const { return kIsWhole ? kBlockNumel : numel_; }
  __device__ __forceinline__ int part_numel() const { return kIsWhole ? kBlockNumel / kNumParts : part_numel_; }
  // The begin of the quads of a run in their parts, and how many bytes of codes there are from there on: 4 and more are
  // a whole quad, 0 and less are none.
  __device__ __forceinline__ int place(int run) const {
    return (run * Codec::kBlockThreads + thread_index()) * kQuadNumel;
  }
  __device__ __forceinline__ int num_bytes(int run) const { return kIsWhole ? kQuadNumel : part_numel_ - place(run); }
  // The begin of quad q in the block, and how many of its elements there are, counted alike.
  __device__ __forceinline__ int first(int q) const { return part_of(q) * part_numel() + place(run_of(q)); }
  __device__ __forceinline__ int num(int q) const {
    if (kIsWhole) return kQuadNumel;
    const int there = numel_ - first(q), bytes = num_bytes(run_of(q));
    return there < bytes ? there : bytes;
  }
  // Whether there is element i of the thread.
  __device__ __forceinline__ bool has(int i) const { return kIsWhole || i % kQuadNumel < num(i / kQuadNumel); }

 private:
  int numel_, part_numel_;
};

// The elements of a thread; of a reference, too.
template <typename Share>
inline constexpr int kNumelOf = std::remove_cvref_t<Share>::kNumel;

template <DType kDType, typename Share>
__device__ __forceinline__ void load_share(const Share& share, const void* source, size_t begin, float padding,
                                           float* values) {
#pragma unroll
  for (int q = 0; q < Share::kQuads; ++q) {
    load_f32<kDType, kQuadNumel, Share::kIsWhole>(source, begin + static_cast<size_t>(share.first(q)), share.num(q),
                                                  padding, values + q * kQuadNumel);
  }
}
template <DType kDType, typename Share>
__device__ __forceinline__ void store_share(const Share& share, const float* values, size_t begin, void* destination) {
#pragma unroll
  for (int q = 0; q < Share::kQuads; ++q) {
    store_f32<kDType, kQuadNumel, Share::kIsWhole>(values + q * kQuadNumel, begin + static_cast<size_t>(share.first(q)),
                                                   share.num(q), destination);
  }
}

// Kernels leave registers for `kResidentThreads` threads on a multiprocessor. So many, of up to 128 registers each,
// where who launches says no other number.
inline constexpr int kMinResidentThreads = 512;

template <typename Codec>
constexpr bool saturates() {
  if constexpr (requires { Codec::kSaturates; }) return Codec::kSaturates;
  return false;
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

// Calls body(share) with that of the calling thread; `are_aligned`: arrays of elements to 16 bytes, messages to 4.
template <typename Codec, typename Body>
__device__ __forceinline__ void with_share(const Codec& codec, const Block& block, bool are_aligned, Body body) {
  if (are_aligned && block.numel == kBlockNumel) {
    body(Share<Codec, true>(codec, block.numel));
  } else {
    body(Share<Codec, false>(codec, block.numel));
  }
}
__device__ __forceinline__ bool are_aligned(const Residual& residual) {
  return is_aligned<16>(residual.in) && is_aligned<16>(residual.out);
}

__device__ __forceinline__ void count_block(bool is_finite, uint64_t* num_nonfinite_blocks) {
  if (is_finite || num_nonfinite_blocks == nullptr || threadIdx.x != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(num_nonfinite_blocks), 1ull);
}

template <typename Codec, DType kDType, int kResidentThreads>
__global__ void __launch_bounds__(Codec::kBlockThreads, kResidentThreads / Codec::kBlockThreads)
    encode_kernel(Codec codec, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& encoding = shared_memory<typename Codec::Encoding>();
  const Block block = current_block(codec, numel);
  with_share(codec, block, is_aligned<16>(source) && is_aligned<4>(bytes), [&](const auto& share) {
    float values[kNumelOf<decltype(share)>];
    load_share<kDType>(share, source, block.begin, Codec::kPadding, values);
    const bool is_finite =
        codec.template encode<false>(share, block.begin, values, bytes + block.offset_bytes, encoding, nullptr);
    count_block(is_finite, num_nonfinite_blocks);
  });
}

// values += the array's elements; padding stays what it is: -0.0 has a meaning.
template <DType kDType, typename Share>
__device__ __forceinline__ void add_share(const Share& share, const void* array, size_t begin, float* values) {
  float addends[Share::kNumel];
  load_share<kDType>(share, array, begin, 0.0f, addends);
#pragma unroll
  for (int i = 0; i < Share::kNumel; ++i) {
    if (share.has(i)) values[i] += addends[i];
  }
}

// Adds the residual to the values, encodes them and renews the residual.
template <typename Codec, typename Share>
__device__ __forceinline__ bool encode_with_residual(const Codec& codec, const Block& block, const Share& share,
                                                     float* values, const Residual& residual, uint8_t* bytes,
                                                     typename Codec::Encoding& encoding) {
  if (residual.in != nullptr) {
    with_type(residual, [&](auto type) { add_share<decltype(type)::value>(share, residual.in, block.begin, values); });
  }
  float decoded[Share::kNumel];
  const bool is_finite =
      codec.template encode<true>(share, block.begin, values, bytes + block.offset_bytes, encoding, decoded);
#pragma unroll
  for (int i = 0; i < Share::kNumel; ++i) decoded[i] = values[i] - decoded[i];
  with_type(residual,
            [&](auto type) { store_share<decltype(type)::value>(share, decoded, block.begin, residual.out); });
  return is_finite;
}

template <typename Codec, DType kDType, int kResidentThreads>
__global__ void __launch_bounds__(Codec::kBlockThreads, kResidentThreads / Codec::kBlockThreads)
    encode_with_residual_kernel(Codec codec, const void* source, Residual residual, size_t numel, uint8_t* bytes,
                                uint64_t* num_nonfinite_blocks) {
  auto& encoding = shared_memory<typename Codec::Encoding>();
  const Block block = current_block(codec, numel);
  const bool aligned = is_aligned<16>(source) && is_aligned<4>(bytes) && are_aligned(residual);
  with_share(codec, block, aligned, [&](const auto& share) {
    float values[kNumelOf<decltype(share)>];
    load_share<kDType>(share, source, block.begin, Codec::kPadding, values);
    count_block(encode_with_residual(codec, block, share, values, residual, bytes, encoding), num_nonfinite_blocks);
  });
}

template <typename Codec, DType kDType>
__global__ void __launch_bounds__(Codec::kBlockThreads, kMinResidentThreads / Codec::kBlockThreads)
    decode_kernel(Codec codec, const uint8_t* bytes, size_t numel, void* destination) {
  auto& decoder = shared_memory<typename Codec::Decoder>();
  const Block block = current_block(codec, numel);
  with_share(codec, block, is_aligned<16>(destination) && is_aligned<4>(bytes), [&](const auto& share) {
    const auto codes = codec.load_codes(share, bytes + block.offset_bytes);
    if (threadIdx.x == 0) decoder = codec.decoder_of(bytes + block.offset_bytes);
    __syncthreads();
    float values[kNumelOf<decltype(share)>];
    codec.decode(share, decoder, codes, [&](int i, float value) { values[i] = value; });
    if constexpr (saturates<Codec>()) {
#pragma unroll
      for (int i = 0; i < kNumelOf<decltype(share)>; ++i) values[i] = saturated(values[i], largest_number(kDType));
    }
    store_share<kDType>(share, values, block.begin, destination);
  });
}

template <typename Codec>
__global__ void __launch_bounds__(Codec::kBlockThreads, kMinResidentThreads / Codec::kBlockThreads)
    decode_add_kernel(Codec codec, const uint8_t* bytes, size_t numel, float* accumulator) {
  auto& decoder = shared_memory<typename Codec::Decoder>();
  const Block block = current_block(codec, numel);
  with_share(codec, block, is_aligned<16>(accumulator) && is_aligned<4>(bytes), [&](const auto& share) {
    const auto codes = codec.load_codes(share, bytes + block.offset_bytes);
    float sums[kNumelOf<decltype(share)>];
    load_share<DType::kF32>(share, accumulator, block.begin, 0.0f, sums);
    if (threadIdx.x == 0) decoder = codec.decoder_of(bytes + block.offset_bytes);
    __syncthreads();
    codec.decode(share, decoder, codes, [&](int i, float value) { sums[i] += value; });
    store_share<DType::kF32>(share, sums, block.begin, accumulator);
  });
}

// So many decoders are made at a time, by as many threads.
inline constexpr int kNumDecoders = kWarpNumThreads;

template <typename Codec>
struct Reducing {
  typename Codec::Decoder decoders[kNumDecoders];
  typename Codec::Encoding encoding;
};

// The sums of what the contributions decode to, by rank, from +0 on; all threads call it. Of a whole block the codes of
// the next one are on their way meanwhile.
template <typename Codec, typename Share>
__device__ __forceinline__ void sum_contributions(const Codec& codec, const Block& block, const Share& share,
                                                  const Contributions& contributions, typename Codec::Decoder* decoders,
                                                  float* sums) {
  const uint8_t* bytes = contributions.codes + block.offset_bytes;
  const uint8_t* next_bytes = bytes;
#pragma unroll
  for (int i = 0; i < Share::kNumel; ++i) sums[i] = 0.0f;
  decltype(codec.load_codes(share, next_bytes)) next;
  if constexpr (Share::kIsWhole) next = codec.load_codes(share, next_bytes);
  for (int begin = 0; begin < contributions.count; begin += kNumDecoders) {
    const int left = contributions.count - begin, count = left < kNumDecoders ? left : kNumDecoders;
    if (begin > 0) __syncthreads();  // all have used the decoders before
    if (thread_index() < count) {
      decoders[threadIdx.x] =
          codec.decoder_of(bytes + static_cast<size_t>(begin + thread_index()) * contributions.stride);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      if constexpr (!Share::kIsWhole) next = codec.load_codes(share, next_bytes);
      const auto codes = next;
      next_bytes += contributions.stride;
      if constexpr (Share::kIsWhole) {
        if (begin + r + 1 < contributions.count) next = codec.load_codes(share, next_bytes);
      }
      codec.decode(share, decoders[r], codes, [&](int i, float value) { sums[i] += value; });
    }
  }
}

// The second half of the reduction: scales the sums and encodes them.
template <bool kHasResidual, typename Codec, typename Share>
__device__ __forceinline__ bool encode_sums(const Codec& codec, const Block& block, const Share& share, float* sums,
                                            const Factor& factor, const Residual& residual, uint8_t* bytes,
                                            typename Codec::Encoding& encoding) {
  factor.scale<Share::kNumel>(sums);
#pragma unroll
  for (int i = 0; i < Share::kNumel; ++i) {
    if (!share.has(i)) sums[i] = Codec::kPadding;
  }
  if constexpr (kHasResidual) {
    return encode_with_residual(codec, block, share, sums, residual, bytes, encoding);
  } else {
    return codec.template encode<false>(share, block.begin, sums, bytes + block.offset_bytes, encoding, nullptr);
  }
}

__device__ __forceinline__ bool are_aligned(const Contributions& contributions) {
  return is_aligned<4>(contributions.codes) && contributions.stride % 4 == 0;
}

// Without a residual, which takes registers, there is room for more threads: a kernel of its own.
template <typename Codec, bool kHasResidual, int kResidentThreads>
__global__ void __launch_bounds__(Codec::kBlockThreads, kResidentThreads / Codec::kBlockThreads)
    reduce_encode_kernel(Codec codec, Contributions contributions, Factor factor, Residual residual, size_t numel,
                         uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& shared = shared_memory<Reducing<Codec>>();
  const Block block = current_block(codec, numel);
  const bool aligned = are_aligned(contributions) && is_aligned<4>(bytes) && are_aligned(residual);
  with_share(codec, block, aligned, [&](const auto& share) {
    float sums[kNumelOf<decltype(share)>];
    sum_contributions(codec, block, share, contributions, shared.decoders, sums);
    const bool is_finite =
        encode_sums<kHasResidual>(codec, block, share, sums, factor, residual, bytes, shared.encoding);
    count_block(is_finite, num_nonfinite_blocks);
  });
}

// One thread block per block of the message.
template <typename Codec, typename... Parameters>
void launch_blocks(const char* name, Stream stream, size_t numel, void (*kernel)(Parameters...),
                   std::type_identity_t<Parameters>... arguments) {
  launch<Codec::kBlockThreads>(name, stream, ceil_div(numel, kBlockNumel), kernel, arguments...);
}

template <int kResidentThreads, typename Codec>
void launch_encode(const char* name, const Codec& codec, DType dtype, const void* source, size_t numel, uint8_t* bytes,
                   uint64_t* num_nonfinite_blocks, Stream stream) {
  for_float_type(dtype, [&](auto type) {
    launch_blocks<Codec>(name, stream, numel, encode_kernel<Codec, decltype(type)::value, kResidentThreads>, codec,
                         source, numel, bytes, num_nonfinite_blocks);
  });
}

template <typename Codec>
void launch_encode_with_residual(const char* name, const Codec& codec, DType dtype, const void* source,
                                 const Residual& residual, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                                 Stream stream) {
  for_float_type(dtype, [&](auto type) {
    launch_blocks<Codec>(name, stream, numel,
                         encode_with_residual_kernel<Codec, decltype(type)::value, kMinResidentThreads>, codec, source,
                         residual, numel, bytes, num_nonfinite_blocks);
  });
}

// The table of a codec. `Kernels` has its kName, and calls body(codec) for the codec of an option; the three may differ
// in their threads:
//
//   template <typename Body> static void with_codec(int option, CounterRng, Body body)
//   template <typename Body> static void with_reduction(int option, CounterRng, Body body)
//   template <typename Body> static void with_residual_reduction(int option, CounterRng, Body body)
//   static constexpr int kReductionResidentThreads, kResidualReductionResidentThreads
template <typename Kernels>
struct Launching {
  static void encode(int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng rng,
                     uint64_t* num_nonfinite_blocks, Stream stream) {
    Kernels::with_codec(option, rng, [=](auto codec) {
      launch_encode<kMinResidentThreads>(Kernels::kName, codec, dtype, source, numel, bytes, num_nonfinite_blocks,
                                         stream);
    });
  }
  static void decode(int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
    Kernels::with_codec(option, {}, [=](auto codec) {
      using Codec = decltype(codec);
      for_float_type(dtype, [&](auto type) {
        launch_blocks<Codec>(Kernels::kName, stream, numel, decode_kernel<Codec, decltype(type)::value>, codec, bytes,
                             numel, destination);
      });
    });
  }
  static void decode_add(int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
    Kernels::with_codec(option, {}, [=](auto codec) {
      using Codec = decltype(codec);
      launch_blocks<Codec>(Kernels::kName, stream, numel, decode_add_kernel<Codec>, codec, bytes, numel, accumulator);
    });
  }
  static void encode_with_residual(int option, DType dtype, const void* source, const Residual& residual, size_t numel,
                                   uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks, Stream stream) {
    Kernels::with_codec(option, rng, [=, &residual](auto codec) {
      launch_encode_with_residual(Kernels::kName, codec, dtype, source, residual, numel, bytes, num_nonfinite_blocks,
                                  stream);
    });
  }
  static void reduce_encode(int option, const Contributions& contributions, double factor, const Residual& residual,
                            size_t numel, uint8_t* bytes, CounterRng rng, uint64_t* num_nonfinite_blocks,
                            Stream stream) {
    if (residual.is_on()) {
      Kernels::with_residual_reduction(option, rng, [=, &contributions, &residual](auto codec) {
        using Codec = decltype(codec);
        constexpr auto kKernel = reduce_encode_kernel<Codec, true, Kernels::kResidualReductionResidentThreads>;
        launch_blocks<Codec>(Kernels::kName, stream, numel, kKernel, codec, contributions, Factor(factor), residual,
                             numel, bytes, num_nonfinite_blocks);
      });
    } else {
      Kernels::with_reduction(option, rng, [=, &contributions](auto codec) {
        using Codec = decltype(codec);
        constexpr auto kKernel = reduce_encode_kernel<Codec, false, Kernels::kReductionResidentThreads>;
        launch_blocks<Codec>(Kernels::kName, stream, numel, kKernel, codec, contributions, Factor(factor), Residual{},
                             numel, bytes, num_nonfinite_blocks);
      });
    }
  }

  static constexpr BlockKernels kTable = {encode, decode, decode_add, encode_with_residual, reduce_encode};
};

}  // namespace bagua::kernels::cuda

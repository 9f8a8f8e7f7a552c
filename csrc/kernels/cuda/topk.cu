// CUDA form of the sparsifier; contract and selection: topk.h. A radix search over the bits of the magnitudes finds the
// smallest that travels, eight bits per pass, the upper ones first: a histogram of the elements that agree in the bits
// before, and a scan of it from its upper end. It ends early once all elements of a bin travel. Two scans over the
// threads then give the elements their places, in the order of their indices.
#include "csrc/kernels/topk.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace {

static_assert(kTopkBlockNumel == kBlockNumel && kTopkMaxK <= kNumThreads, "a thread per element that travels");

constexpr int kThreadNumel = kBlockNumel / kNumThreads;
static_assert(kThreadNumel == 2 * kQuadNumel, "see place()");

constexpr int kNumBins = kNumThreads;
constexpr int kNumPasses = 4;
constexpr int kDigitBits = 8;

__device__ __forceinline__ uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & kF32Abs; }

// Inclusive, over the threads of the block; `totals` is not in use by an earlier scan any more.
__device__ __forceinline__ uint32_t scan(uint32_t value, uint32_t* totals) {
#pragma unroll
  for (int distance = 1; distance < kWarpNumThreads; distance *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_index() >= distance) value += below;
  }
  if (lane_index() == kWarpNumThreads - 1) totals[warp_index()] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
    if (w < warp_index()) value += totals[w];
  }
  return value;
}

// What one of the contributions, or the message, says for the thread: the element that travels in its place.
struct Traveller {
  float value;
  int index;       // none where it is not below the block's elements
  bool is_marked;  // the whole block is NaN
};

struct Topk {
  static constexpr int kBlockThreads = kNumThreads;
  static constexpr int kNumParts = 1;
  static constexpr float kPadding = 0.0f;

  struct Encoding {
    uint32_t bins[kNumPasses][kNumBins];
    uint32_t totals[kNumPasses + 2][kNumWarps];  // of one scan each
    uint32_t digit, num_left, num_in_bin;
  };

  int k;

  __device__ __forceinline__ int padded_numel(int numel) const { return numel; }
  __device__ __forceinline__ size_t wire_bytes() const { return static_cast<size_t>(k) * kTopkElementBytes; }
  __device__ __forceinline__ int num_kept(int numel) const { return k < numel ? k : numel; }

  static __device__ __forceinline__ void store_index(int index, uint8_t* to) {
    store_bytes(static_cast<uint32_t>(index), 2, to);
  }

  __device__ __forceinline__ Traveller load_traveller(int numel, const uint8_t* bytes) const {
    const int kept = num_kept(numel), j = thread_index();
    Traveller traveller{0.0f, numel, magnitude_of(load_f32(bytes)) >= kF32Inf};
    if (j < kept) {
      traveller.value = load_f32(bytes + 4 * j);
      traveller.index = static_cast<int>(load_bytes(bytes + 4 * kept + 2 * j, 2));
    }
    return traveller;
  }

  // All elements whose magnitude, of which only the bits of `mask` are looked at, is above `magnitude`, and of those
  // that are equal to it, `num_equal` in all, the first `num_taken`.
  struct Selection {
    uint32_t magnitude, mask;
    uint32_t num_taken, num_equal;
  };

  template <typename Share>
  __device__ __forceinline__ Selection select_largest(const Share& share, const float* values,
                                                      Encoding& encoding) const {
    Selection selection{0, 0, static_cast<uint32_t>(num_kept(share.numel())), static_cast<uint32_t>(share.numel())};
#pragma unroll
    for (int pass = 0; pass < kNumPasses; ++pass) {
      if (selection.num_taken == selection.num_equal) break;
      const int shift = pass < kNumPasses - 1 ? 31 - kDigitBits * (pass + 1) : 0;
      const uint32_t digits = pass < kNumPasses - 1 ? 0xffu : 0x7fu;
#pragma unroll
      for (int i = 0; i < kThreadNumel; ++i) {
        const uint32_t magnitude = magnitude_of(values[i]);
        if (share.has(i) && (magnitude & selection.mask) == selection.magnitude) {
          atomicAdd(&encoding.bins[pass][magnitude >> shift & digits], 1u);
        }
      }
      __syncthreads();
      const uint32_t bin = kNumBins - 1 - threadIdx.x;  // from the upper end
      const uint32_t count = encoding.bins[pass][bin];
      const uint32_t reached = scan(count, encoding.totals[pass]);
      if (reached >= selection.num_taken && reached - count < selection.num_taken) {
        encoding.digit = bin;
        encoding.num_left = selection.num_taken - (reached - count);
        encoding.num_in_bin = count;
      }
      __syncthreads();
      selection.magnitude |= encoding.digit << shift;
      selection.mask |= digits << shift;
      selection.num_taken = encoding.num_left;
      selection.num_equal = encoding.num_in_bin;
    }
    return selection;
  }

  // The places of the thread's chosen elements, one bit of `chosen` each, among those of the block. A thread's second
  // quad comes after the first quads of all threads.
  static __device__ __forceinline__ void place(uint32_t chosen, uint32_t* totals, int* places) {
    const uint32_t first = chosen & 0xfu, second = chosen >> kQuadNumel;
    const auto counts = static_cast<uint32_t>(__popc(first)) | static_cast<uint32_t>(__popc(second)) << 16;
    const uint32_t reached = scan(counts, totals), before = reached - counts;
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) all += totals[w];
#pragma unroll
    for (int i = 0; i < kQuadNumel; ++i) {
      const uint32_t below = (1u << i) - 1;
      places[i] = static_cast<int>(before & 0xffffu) + __popc(first & below);
      places[kQuadNumel + i] = static_cast<int>((all & 0xffffu) + (before >> 16)) + __popc(second & below);
    }
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    const int kept = num_kept(share.numel());
    bool has_nonfinite = false;
#pragma unroll
    for (int i = 0; i < kThreadNumel; ++i) has_nonfinite |= magnitude_of(values[i]) >= kF32Inf;
#pragma unroll
    for (int pass = 0; pass < kNumPasses; ++pass) encoding.bins[pass][threadIdx.x] = 0;
    if (__syncthreads_or(has_nonfinite)) {
      if (thread_index() < kept) {
        store_f32(kNan, bytes + 4 * thread_index());
        store_index(thread_index(), bytes + 4 * kept + 2 * thread_index());
      }
      if constexpr (kDecodes) {
#pragma unroll
        for (int i = 0; i < kThreadNumel; ++i) decoded[i] = kNan;
      }
      return false;
    }
    const Selection selection = select_largest(share, values, encoding);
    uint32_t chosen = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kThreadNumel; ++i) {
      const uint32_t magnitude = magnitude_of(values[i]) & selection.mask;
      if (share.has(i) && magnitude > selection.magnitude) chosen |= 1u << i;
      if (share.has(i) && magnitude == selection.magnitude) equal |= 1u << i;
    }
    int places[kThreadNumel];
    if (selection.num_taken < selection.num_equal) {
      place(equal, encoding.totals[kNumPasses], places);
#pragma unroll
      for (int i = 0; i < kThreadNumel; ++i) {
        if (places[i] >= static_cast<int>(selection.num_taken)) equal &= ~(1u << i);
      }
    }
    chosen |= equal;
    place(chosen, encoding.totals[kNumPasses + 1], places);
#pragma unroll
    for (int i = 0; i < kThreadNumel; ++i) {
      const bool is_chosen = chosen >> i & 1u;
      if (is_chosen) {
        store_f32(values[i], bytes + 4 * places[i]);
        store_index(share.first(i / kQuadNumel) + i % kQuadNumel, bytes + 4 * kept + 2 * places[i]);
      }
      if constexpr (kDecodes) decoded[i] = is_chosen ? values[i] : 0.0f;
    }
    return true;
  }
};

// The elements of a block, all of them in shared memory, because those that travel lie anywhere.
struct Scattered {
  alignas(16) float values[kBlockNumel];
};

template <typename Share>
__device__ __forceinline__ void fill_share(const Share& share, float value, float* values) {
  Elements<float, kQuadNumel> quad;
#pragma unroll
  for (int i = 0; i < kQuadNumel; ++i) quad.element[i] = value;
#pragma unroll
  for (int q = 0; q < Share::kQuads; ++q) store(quad, share.num(q), values + share.first(q));
}

template <DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    decode_scattered_kernel(Topk codec, const uint8_t* bytes, size_t numel, void* destination) {
  auto& block_values = shared_memory<Scattered>();
  const Block block = current_block(codec, numel);
  const Traveller traveller = codec.load_traveller(block.numel, bytes + block.offset_bytes);
  with_share(codec, block, is_aligned<16>(destination), [&](const auto& share) {
    fill_share(share, traveller.is_marked ? kNan : 0.0f, block_values.values);
    __syncthreads();
    if (!traveller.is_marked && traveller.index < block.numel) block_values.values[traveller.index] = traveller.value;
    __syncthreads();
    float values[kThreadNumel];
    load_share<DType::kF32>(share, block_values.values, 0, 0.0f, values);
    store_share<kDType>(share, values, block.begin, destination);
  });
}

__global__ void __launch_bounds__(kNumThreads)
    decode_add_scattered_kernel(Topk codec, const uint8_t* bytes, size_t numel, float* accumulator) {
  const Block block = current_block(codec, numel);
  const Traveller traveller = codec.load_traveller(block.numel, bytes + block.offset_bytes);
  float* sums = accumulator + block.begin;
  if (traveller.is_marked) {
    for (int i = thread_index(); i < block.numel; i += kNumThreads) sums[i] += kNan;
  } else if (traveller.index < block.numel) {
    sums[traveller.index] += traveller.value;
  }
}

struct ReducingScattered {
  Scattered sums;
  Topk::Encoding encoding;
};

// By rank: all threads are done with one contribution before the next is added.
template <typename Share>
__device__ __forceinline__ void sum_scattered(const Topk& codec, const Block& block, const Share& share,
                                              const Contributions& contributions, float* sums) {
  const uint8_t* bytes = contributions.codes + block.offset_bytes;
  Traveller traveller = codec.load_traveller(block.numel, bytes);
  fill_share(share, 0.0f, sums);
  __syncthreads();
  for (int rank = 0; rank < contributions.count; ++rank) {
    const Traveller current = traveller;
    if (rank + 1 < contributions.count) {
      traveller = codec.load_traveller(block.numel, bytes + static_cast<size_t>(rank + 1) * contributions.stride);
    }
    if (current.is_marked) {
      for (int i = thread_index(); i < block.numel; i += kNumThreads) sums[i] += kNan;
    } else if (current.index < block.numel) {
      sums[current.index] += current.value;
    }
    __syncthreads();
  }
}

// Blocks on a multiprocessor that have registers enough: for 6 ptxas 13.0 spills on sm_80.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BAGUA_REDUCING_BLOCKS 5
#else
#define BAGUA_REDUCING_BLOCKS 6
#endif

__global__ void __launch_bounds__(kNumThreads, BAGUA_REDUCING_BLOCKS)
    reduce_encode_scattered_kernel(Topk codec, Contributions contributions, Factor factor, Residual residual,
                                   size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& shared = shared_memory<ReducingScattered>();
  const Block block = current_block(codec, numel);
  with_share(codec, block, are_aligned(residual), [&](const auto& share) {
    sum_scattered(codec, block, share, contributions, shared.sums.values);
    float sums[kThreadNumel];
    load_share<DType::kF32>(share, shared.sums.values, 0, Topk::kPadding, sums);
    const bool is_finite = encode_sums(codec, block, share, sums, factor, residual, bytes, shared.encoding);
    count_block(is_finite, num_nonfinite_blocks);
  });
}

Topk codec_of(int k) { return {k}; }

}  // namespace

void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks,
                 Stream stream) {
  launch_encode("topk_encode", codec_of(k), dtype, source, numel, bytes, num_nonfinite_blocks, stream);
}

void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  for_float_type(dtype, [=](auto type) {
    launch("topk_decode", stream, ceil_div(numel, kBlockNumel), decode_scattered_kernel<decltype(type)::value>,
           codec_of(k), bytes, numel, destination);
  });
}

void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  launch("topk_decode_add", stream, ceil_div(numel, kBlockNumel), decode_add_scattered_kernel, codec_of(k), bytes,
         numel, accumulator);
}

void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_encode_with_residual("topk_encode_with_residual", codec_of(k), dtype, source, residual, numel, bytes,
                              num_nonfinite_blocks, stream);
}

void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch("topk_reduce_encode", stream, ceil_div(numel, kBlockNumel), reduce_encode_scattered_kernel, codec_of(k),
         contributions, Factor(factor), residual, numel, bytes, num_nonfinite_blocks);
}

}  // namespace bagua::kernels::cuda

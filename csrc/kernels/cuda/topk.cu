// CUDA form of the sparsifier; contract and selection: topk.h.
//
// Most blocks: the largest magnitudes of groups of 16 elements go into a histogram, which says what k groups reach, so
// that k elements reach it, too. Few more do: these candidates are collected in shared memory, in any order, and one
// warp halves the range of their keys until k are above. Other blocks, which are short or not aligned, or have too many
// candidates, or too few because most elements are 0, and all where k is above 64: all threads halve the range of the
// magnitudes.
//
// The choice is bits, one per element; an element goes to the place given by how many are set before its own.
#include "csrc/kernels/topk.h"

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"

namespace bagua::kernels::cuda {
namespace {

static_assert(kTopkMaxK <= kNumThreads, "a thread per element that is decoded");

constexpr int kWordBits = 32;
constexpr int kNumWords = kBlockNumel / kWordBits;
constexpr int kEncodeThreads = 64;
constexpr int kEncodeWarps = kEncodeThreads / kWarpNumThreads;
static_assert(kEncodeThreads == kNumWords && kEncodeWarps == 2, "a thread per word of chosen bits");

// The groups of a thread; bins for their largest, from that of the block down, eight per power of two.
constexpr int kNumGroups = 2;
constexpr int kBinShift = 20;
constexpr int kNumBins = 4 * kWarpNumThreads;
// With a greater k than that many blocks had more candidates than there is room for.
constexpr int kMaxCandidateK = kNumGroups * kEncodeThreads / 2;
constexpr int kMaxCandidates = 128;

// A candidate in the order of the selection: magnitude, index from the end, sign. No two of a block are equal.
constexpr int kKeyShift = 12;
static_assert(kBlockNumel << 1 == 1 << kKeyShift);

// Magnitudes are bits where they are halved, and numbers, which are in the same order, where they are compared.
__device__ __forceinline__ uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & kF32Abs; }
__device__ __forceinline__ float number_of(uint32_t magnitude) { return std::bit_cast<float>(magnitude); }

__device__ __forceinline__ uint64_t key_of(float value, int index) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t low = static_cast<uint32_t>(kBlockNumel - 1 - index) << 1 | bits >> 31;
  return static_cast<uint64_t>(bits & kF32Abs) << kKeyShift | low;
}
__device__ __forceinline__ int index_of(uint64_t key) {
  return kBlockNumel - 1 - static_cast<int>(key >> 1 & (kBlockNumel - 1));
}

// An element that travels, as the message has it.
struct Traveller {
  float value;
  int index;       // none where it is not below the block's elements
  bool is_marked;  // the whole block is NaN
};

template <int kThreads>
struct Topk {
  static constexpr int kBlockThreads = kThreads;
  static constexpr int kNumParts = 1;
  static constexpr float kPadding = 0.0f;

  struct Encoding {
    alignas(16) float values[kBlockNumel];  // of all threads that have a candidate, at least
    alignas(16) uint32_t bins[kNumBins];
    uint32_t largest[kEncodeWarps];
    uint32_t counts[2][kEncodeWarps];  // of every other step
    alignas(8) uint32_t chosen[kNumWords];
    uint32_t num_candidates;
    uint16_t candidates[kMaxCandidates];  // indices
  };

  int k;

  __device__ __forceinline__ int padded_numel(int numel) const { return numel; }
  __device__ __forceinline__ size_t wire_bytes() const { return static_cast<size_t>(k) * kTopkElementBytes; }
  __device__ __forceinline__ int num_kept(int numel) const { return k < numel ? k : numel; }

  static __device__ __forceinline__ void store_index(int index, uint8_t* to) {
    store_bytes(static_cast<uint32_t>(index), 2, to);
  }

  __device__ __forceinline__ Traveller load_traveller(int numel, const uint8_t* bytes, int j) const {
    const int kept = num_kept(numel);
    Traveller traveller{0.0f, numel, magnitude_of(load_f32(bytes)) >= kF32Inf};
    if (j < kept) {
      traveller.value = load_f32(bytes + 4 * j);
      traveller.index = static_cast<int>(load_bytes(bytes + 4 * kept + 2 * j, 2));
    }
    return traveller;
  }

  // A magnitude that at least k elements reach, and few more: the lower end of the bin which the k-th largest group is
  // in. The smallest that is not 0, which fewer may reach, where that is the last bin, or goes down to 0. All threads
  // call it.
  __device__ __forceinline__ uint32_t coarse_bound(const uint32_t* of_groups, uint32_t largest,
                                                   Encoding& encoding) const {
#pragma unroll
    for (int g = 0; g < kNumGroups; ++g) {
      const uint32_t bin = (largest - of_groups[g]) >> kBinShift;
      atomicAdd(&encoding.bins[bin < kNumBins - 1 ? bin : kNumBins - 1], 1u);
    }
    __syncthreads();
    // A lane has four bins.
    const uint4 counts = as_vectors<uint4>(encoding.bins)[lane_index()];
    const uint32_t two = counts.x + counts.y, three = two + counts.z, all = three + counts.w;
    const uint32_t reached = scan_of_warp(all), before = reached - all, needed = static_cast<uint32_t>(k);
    uint32_t bin = 4 * static_cast<uint32_t>(lane_index());
    bin += (before + counts.x < needed) + (before + two < needed) + (before + three < needed);
    bin = __shfl_sync(kAllLanes, bin, __ffs(static_cast<int>(__ballot_sync(kAllLanes, reached >= needed))) - 1);
    const uint32_t depth = (bin + 1) << kBinShift;
    return bin == kNumBins - 1 || depth > largest ? 1 : largest - depth + 1;
  }

  // Chooses k candidates, up to kNumKeys per lane, by one warp. All keys are in [low, high).
  template <int kNumKeys>
  __device__ __forceinline__ void choose(uint64_t low, uint64_t high, Encoding& encoding) const {
    const uint32_t num_candidates = encoding.num_candidates, needed = static_cast<uint32_t>(k);
    uint64_t keys[kNumKeys];
#pragma unroll
    for (int i = 0; i < kNumKeys; ++i) {
      const uint32_t at = static_cast<uint32_t>(i * kWarpNumThreads) + threadIdx.x;
      const int index = at < num_candidates ? encoding.candidates[at] : 0;
      keys[i] = at < num_candidates ? key_of(encoding.values[index], index) : 0;
    }
    uint32_t count = num_candidates;  // of keys from low on: k or more; from high on there are fewer
    while (count != needed) {
      const uint64_t middle = low + (high - low) / 2;
      uint32_t reach = 0;
#pragma unroll
      for (int i = 0; i < kNumKeys; ++i) {
        reach += static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, keys[i] >= middle)));
      }
      const bool is_enough = reach >= needed;
      low = is_enough ? middle : low;
      high = is_enough ? high : middle;
      count = is_enough ? reach : count;
    }
#pragma unroll
    for (int i = 0; i < kNumKeys; ++i) {
      const int index = index_of(keys[i]);
      if (keys[i] >= low) atomicOr(&encoding.chosen[index / kWordBits], 1u << index % kWordBits);
    }
  }

  // Chooses k elements of most blocks; false where this is none of them. All threads call it.
  template <typename Share>
  __device__ __forceinline__ bool choose_candidates(const Share& share, const float* values, const uint32_t* of_groups,
                                                    uint32_t largest, Encoding& encoding) const {
    const uint32_t bound = coarse_bound(of_groups, largest, encoding);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) mine |= absolute(values[i]) >= number_of(bound) ? 1u << i : 0u;
    if (mine != 0) {
      store_share<DType::kF32>(share, values, 0, encoding.values);
      uint32_t place = atomicAdd(&encoding.num_candidates, static_cast<uint32_t>(__popc(mine)));
      do {
        const int i = __ffs(static_cast<int>(mine)) - 1;
        const int index = share.first(i / kQuadNumel) + i % kQuadNumel;
        if (place < kMaxCandidates) encoding.candidates[place] = static_cast<uint16_t>(index);
        ++place;
        mine &= mine - 1;
      } while (mine != 0);
    }
    __syncthreads();
    const uint32_t num_candidates = encoding.num_candidates;
    if (num_candidates < static_cast<uint32_t>(k) || num_candidates > kMaxCandidates) return false;
    if (warp_index() == 0) {
      const uint64_t low = static_cast<uint64_t>(bound) << kKeyShift;
      const uint64_t high = (static_cast<uint64_t>(largest) + 1) << kKeyShift;
      if (num_candidates <= 2 * kWarpNumThreads) {
        choose<2>(low, high, encoding);
      } else {
        choose<kMaxCandidates / kWarpNumThreads>(low, high, encoding);
      }
    }
    return true;
  }

  // How many of the block's elements is_one(i) holds for, i being one of the thread's. All threads call it; `counts` is
  // not that of the call before.
  template <typename Share, typename IsOne>
  static __device__ __forceinline__ uint32_t count(const Share&, IsOne is_one, uint32_t* counts) {
    uint32_t num = 0;
#pragma unroll
    for (int i = 0; i < Share::kNumel; ++i) num += is_one(i) ? 1 : 0;
    num = __reduce_add_sync(kAllLanes, num);
    if (lane_index() == 0) counts[warp_index()] = num;
    __syncthreads();
    num = 0;
#pragma unroll
    for (int w = 0; w < kEncodeWarps; ++w) num += counts[w];
    return num;
  }

  // Chooses the elements of any block. All threads call it.
  template <typename Share>
  __device__ __forceinline__ void choose_by_search(const Share& share, const float* values, uint32_t largest,
                                                   Encoding& encoding) const {
    const auto numel = static_cast<uint32_t>(share.numel()), needed = static_cast<uint32_t>(num_kept(share.numel()));
    const auto place = [&](int i) { return static_cast<uint32_t>(share.first(i / kQuadNumel) + i % kQuadNumel); };
    store_share<DType::kF32>(share, values, 0, encoding.values);
    uint32_t step = 0;
    // Magnitudes from `low` on are enough, and from `high` on too few.
    uint32_t low = 0, high = largest + 1, num_low = numel, num_high = 0;
#pragma unroll 1
    while (num_low != needed && high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const uint32_t num = count(
          share, [&](int i) { return absolute(values[i]) >= number_of(middle); }, encoding.counts[step++ % 2]);
      if (num >= needed) {
        low = middle;
        num_low = num;
      } else {
        high = middle;
        num_high = num;
      }
    }
    // The first ones of those that are equal to `low`.
    uint32_t end = numel;
    if (num_low != needed) {
      uint32_t begin = 0;
#pragma unroll 1
      while (end - begin > 1) {
        const uint32_t middle = begin + (end - begin) / 2;
        const auto is_one = [&](int i) { return absolute(values[i]) == number_of(low) && place(i) < middle; };
        const bool is_enough = count(share, is_one, encoding.counts[step++ % 2]) >= needed - num_high;
        end = is_enough ? middle : end;
        begin = is_enough ? begin : middle;
      }
    }
#pragma unroll
    for (int q = 0; q < Share::kQuads; ++q) {
      uint32_t bits = 0;
#pragma unroll
      for (int i = q * kQuadNumel; i < (q + 1) * kQuadNumel; ++i) {
        const float magnitude = absolute(values[i]);
        const bool is_chosen = magnitude > number_of(low) || (magnitude == number_of(low) && place(i) < end);
        bits |= is_chosen ? 1u << i % kQuadNumel : 0u;
      }
      if (bits != 0) atomicOr(&encoding.chosen[share.first(q) / kWordBits], bits << share.first(q) % kWordBits);
    }
  }

  // The message, of what is chosen; all threads call it. A lane has two words, of which each warp stores one.
  template <typename Share>
  __device__ __forceinline__ void store_chosen(const Share& share, uint8_t* bytes, const Encoding& encoding) const {
    const int kept = num_kept(share.numel());
    const uint2 words = as_vectors<uint2>(encoding.chosen)[lane_index()];
    const auto num_first = static_cast<uint32_t>(__popc(words.x)), num_second = static_cast<uint32_t>(__popc(words.y));
    const bool is_first = warp_index() == 0;
    uint32_t place = scan_of_warp(num_first + num_second) - num_second - (is_first ? num_first : 0);
    for (uint32_t word = is_first ? words.x : words.y; word != 0; word &= word - 1, ++place) {
      const int in_word = __ffs(static_cast<int>(word)) - 1;
      const int index = (2 * lane_index() + warp_index()) * kWordBits + in_word;
      store_bytes<Share::kIsWhole>(std::bit_cast<uint32_t>(encoding.values[index]), 4, bytes + 4 * place);
      store_index(index, bytes + 4 * kept + 2 * place);
    }
  }

  template <bool kDecodes, typename Share>
  __device__ __forceinline__ bool encode(const Share& share, size_t, const float* values, uint8_t* bytes,
                                         Encoding& encoding, float* decoded) const {
    constexpr int kGroupNumel = Share::kNumel / kNumGroups;
    uint32_t of_groups[kNumGroups], largest = 0;  // bits; those of NaN are above all
#pragma unroll
    for (int g = 0; g < kNumGroups; ++g) {
      float of_group = 0.0f;
#pragma unroll
      for (int i = g * kGroupNumel; i < (g + 1) * kGroupNumel; ++i) {
        of_group = greater_or_nan(of_group, absolute(values[i]));
      }
      of_groups[g] = std::bit_cast<uint32_t>(of_group);
      largest = of_groups[g] > largest ? of_groups[g] : largest;
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane_index() == 0) encoding.largest[warp_index()] = largest;
#pragma unroll
    for (int b = 0; b < kNumBins; b += kThreads) encoding.bins[b + thread_index()] = 0;
    encoding.chosen[threadIdx.x] = 0;
    encoding.num_candidates = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kEncodeWarps; ++w) largest = encoding.largest[w] > largest ? encoding.largest[w] : largest;
    if (largest >= kF32Inf) {
      const int kept = num_kept(share.numel());
      for (int j = thread_index(); j < kept; j += kThreads) {
        store_f32(kNan, bytes + 4 * j);
        store_index(j, bytes + 4 * kept + 2 * j);
      }
      if constexpr (kDecodes) {
#pragma unroll
        for (int i = 0; i < Share::kNumel; ++i) decoded[i] = kNan;
      }
      return false;
    }
    bool is_chosen = false;
    if constexpr (Share::kIsWhole) {
      if (k <= kMaxCandidateK) is_chosen = choose_candidates(share, values, of_groups, largest, encoding);
    }
    if (!is_chosen) choose_by_search(share, values, largest, encoding);
    __syncthreads();
    store_chosen(share, bytes, encoding);
    if constexpr (kDecodes) {
#pragma unroll
      for (int q = 0; q < Share::kQuads; ++q) {
        const uint32_t bits = encoding.chosen[share.first(q) / kWordBits] >> share.first(q) % kWordBits;
#pragma unroll
        for (int i = 0; i < kQuadNumel; ++i) {
          decoded[q * kQuadNumel + i] = (bits >> i & 1u) != 0 ? values[q * kQuadNumel + i] : 0.0f;
        }
      }
    }
    return true;
  }
};

using TopkEncoder = Topk<kEncodeThreads>;
using TopkDecoder = Topk<kNumThreads>;

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
    decode_scattered_kernel(TopkDecoder codec, const uint8_t* bytes, size_t numel, void* destination) {
  auto& block_values = shared_memory<Scattered>();
  const Block block = current_block(codec, numel);
  const Traveller traveller = codec.load_traveller(block.numel, bytes + block.offset_bytes, thread_index());
  with_share(codec, block, is_aligned<16>(destination), [&](const auto& share) {
    fill_share(share, traveller.is_marked ? kNan : 0.0f, block_values.values);
    __syncthreads();
    if (!traveller.is_marked && traveller.index < block.numel) block_values.values[traveller.index] = traveller.value;
    __syncthreads();
    float values[kNumelOf<decltype(share)>];
    load_share<DType::kF32>(share, block_values.values, 0, TopkDecoder::kPadding, values);
    store_share<kDType>(share, values, block.begin, destination);
  });
}

__global__ void __launch_bounds__(kNumThreads)
    decode_add_scattered_kernel(TopkDecoder codec, const uint8_t* bytes, size_t numel, float* accumulator) {
  const Block block = current_block(codec, numel);
  const Traveller traveller = codec.load_traveller(block.numel, bytes + block.offset_bytes, thread_index());
  float* sums = accumulator + block.begin;
  if (traveller.is_marked) {
    for (int i = thread_index(); i < block.numel; i += kNumThreads) sums[i] += kNan;
  } else if (traveller.index < block.numel) {
    sums[traveller.index] += traveller.value;
  }
}

// Adds by rank: all threads are done with one contribution before the next is added.
template <typename Share>
__device__ __forceinline__ void sum_scattered(const TopkEncoder& codec, const Block& block, const Share& share,
                                              const Contributions& contributions, float* sums) {
  const uint8_t* bytes = contributions.codes + block.offset_bytes;
  Traveller next = codec.load_traveller(block.numel, bytes, thread_index());
  fill_share(share, 0.0f, sums);
  __syncthreads();
  for (int rank = 0; rank < contributions.count; ++rank) {
    Traveller traveller = next;
    const uint8_t* next_bytes = bytes + contributions.stride;
    if (rank + 1 < contributions.count) next = codec.load_traveller(block.numel, next_bytes, thread_index());
    if (traveller.is_marked) {
      for (int i = thread_index(); i < block.numel; i += kEncodeThreads) sums[i] += kNan;
    } else {
      for (int j = thread_index(); j < codec.k; j += kEncodeThreads) {
        if (j >= kEncodeThreads) traveller = codec.load_traveller(block.numel, bytes, j);
        if (traveller.index < block.numel) sums[traveller.index] += traveller.value;
      }
    }
    bytes = next_bytes;
    __syncthreads();
  }
}

template <bool kHasResidual, int kResidentThreads>
__global__ void __launch_bounds__(kEncodeThreads, kResidentThreads / kEncodeThreads)
    reduce_encode_scattered_kernel(TopkEncoder codec, Contributions contributions, Factor factor, Residual residual,
                                   size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& encoding = shared_memory<TopkEncoder::Encoding>();
  const Block block = current_block(codec, numel);
  with_share(codec, block, is_aligned<4>(bytes) && are_aligned(residual), [&](const auto& share) {
    sum_scattered(codec, block, share, contributions, encoding.values);
    float sums[kNumelOf<decltype(share)>];
    load_share<DType::kF32>(share, encoding.values, 0, TopkEncoder::kPadding, sums);
    const bool is_finite = encode_sums<kHasResidual>(codec, block, share, sums, factor, residual, bytes, encoding);
    count_block(is_finite, num_nonfinite_blocks);
  });
}

constexpr const char* kTopkName = "topk";

void topk_encode(int k, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng,
                 uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_encode<896>(kTopkName, TopkEncoder{k}, dtype, source, numel, bytes, num_nonfinite_blocks, stream);
}

void topk_decode(int k, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  for_float_type(dtype, [=](auto type) {
    launch(kTopkName, stream, ceil_div(numel, kBlockNumel), decode_scattered_kernel<decltype(type)::value>,
           TopkDecoder{k}, bytes, numel, destination);
  });
}

void topk_decode_add(int k, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  launch(kTopkName, stream, ceil_div(numel, kBlockNumel), decode_add_scattered_kernel, TopkDecoder{k}, bytes, numel,
         accumulator);
}

void topk_encode_with_residual(int k, DType dtype, const void* source, const Residual& residual, size_t numel,
                               uint8_t* bytes, CounterRng, uint64_t* num_nonfinite_blocks, Stream stream) {
  launch_encode_with_residual(kTopkName, TopkEncoder{k}, dtype, source, residual, numel, bytes, num_nonfinite_blocks,
                              stream);
}

void topk_reduce_encode(int k, const Contributions& contributions, double factor, const Residual& residual,
                        size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite_blocks, Stream stream) {
  const auto kernel = residual.is_on() ? reduce_encode_scattered_kernel<true, kMinResidentThreads>
                                       : reduce_encode_scattered_kernel<false, 768>;
  launch_blocks<TopkEncoder>(kTopkName, stream, numel, kernel, TopkEncoder{k}, contributions, Factor(factor), residual,
                             numel, bytes, num_nonfinite_blocks);
}

}  // namespace

const BlockKernels kTopk = {topk_encode, topk_decode, topk_decode_add, topk_encode_with_residual, topk_reduce_encode};

}  // namespace bagua::kernels::cuda

// CUDA form of the sparsifier in chunks; contract and arithmetic: topk_chunk.h. One thread block per chunk, whose
// elements stay in registers. All threads halve the range of the magnitudes until k elements are above; the choice is
// bits, one per element, and an element goes to the place given by how many are set before its own. The transform is in
// dct.h.
#include "csrc/kernels/topk_chunk.h"

#include <type_traits>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cuda/block_codec.h"
#include "csrc/kernels/cuda/dct.h"

namespace bagua::kernels::cuda {
namespace {

constexpr int kChunkNumel = kTopkChunkNumel;
constexpr int kChunkElements = kChunkNumel / kNumThreads;  // of a thread
constexpr int kChunkQuads = kChunkElements / kQuadNumel;
// How many blocks of an encoder a multiprocessor has registers for.
constexpr int chunk_blocks(bool is_dct, bool has_residual) { return is_dct || has_residual ? 3 : 4; }
constexpr int kChunkWordBits = 32;
constexpr int kChunkWords = kChunkNumel / kChunkWordBits;
constexpr int kWordsOfLane = kChunkWords / kWarpNumThreads;
constexpr uint32_t kChunkHalfAnOctave = 1u << 22;
constexpr uint32_t kAllMagnitudes = 1u << 31;  // a stride that no range of magnitudes has room for
static_assert(kTopkMaxK <= kNumThreads, "a thread per element that travels");

__device__ __forceinline__ uint32_t bits_of_magnitude(float value) { return std::bit_cast<uint32_t>(value) & kF32Abs; }

// The index of element i of the thread.
__device__ __forceinline__ int chunk_index(int i) {
  return (i / kQuadNumel * kNumThreads + thread_index()) * kQuadNumel + i % kQuadNumel;
}

// A chunk as its thread block sees it. Thread t has its quads t, t + kNumThreads, ...
template <bool kIsDct>
struct Chunk {
  TopkChunk format;
  size_t begin;
  int numel;
  size_t offset_bytes;

  __device__ __forceinline__ Chunk(TopkChunk format, size_t numel_of_all)
      : format(format),
        begin(static_cast<size_t>(blockIdx.x) * kChunkNumel),
        numel(numel_of_all - begin < kChunkNumel ? static_cast<int>(numel_of_all - begin) : kChunkNumel),
        offset_bytes(blockIdx.x * format.chunk_bytes(kChunkNumel)) {}

  __device__ __forceinline__ int num_kept() const { return format.k < numel ? format.k : numel; }
  __device__ __forceinline__ bool has(int i) const { return chunk_index(i) < numel; }
  // Elements or coefficients are selected from so many.
  __device__ __forceinline__ int num_coded() const { return kIsDct ? kChunkNumel : numel; }
  __device__ __forceinline__ bool has_coded(int i) const { return kIsDct || has(i); }

  template <DType kDType>
  __device__ __forceinline__ void load(const void* array, float* values) const {
#pragma unroll
    for (int i = 0; i < kChunkElements; i += kQuadNumel) {
      load_f32<kDType, kQuadNumel>(array, begin + static_cast<size_t>(chunk_index(i)), numel - chunk_index(i), 0.0f,
                                   values + i);
    }
  }
  template <DType kDType>
  __device__ __forceinline__ void store(const float* values, void* array) const {
#pragma unroll
    for (int i = 0; i < kChunkElements; i += kQuadNumel) {
      store_f32<kDType, kQuadNumel>(values + i, begin + static_cast<size_t>(chunk_index(i)), numel - chunk_index(i),
                                    array);
    }
  }
};

// Both levels as f32.
struct Levels {
  float lower, upper;

  __device__ __forceinline__ uint32_t code_of(float value) const {
    const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31;
    return sign | (absolute(value) > lower * 0.5f + upper * 0.5f ? 2u : 0u);
  }
  __device__ __forceinline__ float value_of(uint32_t code) const {
    return std::bit_cast<float>(bits_of_magnitude((code & 2) != 0 ? upper : lower) | code << 31);
  }
  __device__ __forceinline__ bool are_marked() const {
    return bits_of_magnitude(lower) >= kF32Inf || bits_of_magnitude(upper) >= kF32Inf;
  }
};

__device__ __forceinline__ Levels load_levels(const uint8_t* bytes) {
  return {std::bit_cast<float>(load_bytes(bytes, 2) << 16), std::bit_cast<float>(load_bytes(bytes + 2, 2) << 16)};
}

// The memory that the threads share while they encode.
struct ChunkEncoding {
  uint32_t largest[kNumWarps];
  uint32_t counts[2][kNumWarps];  // of every other step
  alignas(16) uint32_t above[kChunkWords];
  alignas(16) uint32_t equal[kChunkWords];
  uint32_t num_before[kChunkWords];  // of what travels, before the word
  float kept[kTopkMaxK];
  uint16_t indices[kTopkMaxK];
  Levels levels;
};

// An element that travels, as the message has it.
struct ChunkTraveller {
  float value;
  int index;       // none where it is not below num_coded
  bool is_marked;  // the whole chunk is NaN
};

template <bool kIsDct>
__device__ __forceinline__ ChunkTraveller load_traveller(const Chunk<kIsDct>& chunk, const uint8_t* bytes) {
  const int kept = chunk.num_kept(), j = thread_index();
  ChunkTraveller traveller{0.0f, chunk.num_coded(), false};
  const Levels levels = chunk.format.has_2_bits ? load_levels(bytes) : Levels{load_f32(bytes), 0.0f};
  traveller.is_marked = levels.are_marked();
  if (j >= kept) return traveller;
  if (chunk.format.has_2_bits) {
    traveller.value = levels.value_of(static_cast<uint32_t>(bytes[kTopkChunkLevelBytes + j / 4]) >> (j % 4 * 2));
  } else {
    traveller.value = load_f32(bytes + 4 * j);
  }
  const uint8_t* indices = bytes + chunk.format.codes_bytes(static_cast<size_t>(kept));
  const uint32_t pair = load_bytes(indices + j / 2 * 3 + j % 2, 2);
  traveller.index = static_cast<int>(j % 2 == 0 ? pair & (kChunkNumel - 1) : pair >> (16 - kTopkChunkIndexBits));
  return traveller;
}

// How many of the chunk's elements are at least `limit`. All threads call it; `counts` is not that of the call before.
template <bool kIsDct>
__device__ __forceinline__ uint32_t num_at_least(const Chunk<kIsDct>& chunk, const float* values, uint32_t limit,
                                                 uint32_t* counts) {
  uint32_t num = 0;
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) num += chunk.has_coded(i) && bits_of_magnitude(values[i]) >= limit ? 1 : 0;
  num = __reduce_add_sync(kAllLanes, num);
  if (lane_index() == 0) counts[warp_index()] = num;
  __syncthreads();
  num = 0;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) num += counts[w];
  return num;
}

// Returns how many bits are set in the words of the lanes before. A lane of the first warp calls it with its words.
__device__ __forceinline__ uint32_t num_before_lane(const uint32_t* words) {
  uint32_t num = 0;
#pragma unroll
  for (int w = 0; w < kWordsOfLane; ++w) num += static_cast<uint32_t>(__popc(words[w]));
  return scan_of_warp(num) - num;
}

// Completes the choice by the first `num_ties` of the equal ones, and counts. The first warp calls it.
__device__ __forceinline__ void choose_ties(uint32_t num_ties, ChunkEncoding& encoding) {
  const int first = lane_index() * kWordsOfLane;
  uint32_t chosen[kWordsOfLane], equal[kWordsOfLane];
#pragma unroll
  for (int w = 0; w < kWordsOfLane; ++w) {
    chosen[w] = encoding.above[first + w];
    equal[w] = encoding.equal[first + w];
  }
  uint32_t num = num_before_lane(equal);
#pragma unroll
  for (int w = 0; w < kWordsOfLane; ++w) {
    for (uint32_t left = equal[w]; left != 0 && num < num_ties; left &= left - 1, ++num)
      chosen[w] |= left & (0u - left);
  }
  num = num_before_lane(chosen);
#pragma unroll
  for (int w = 0; w < kWordsOfLane; ++w) {
    encoding.above[first + w] = chosen[w];
    encoding.num_before[first + w] = num;
    num += static_cast<uint32_t>(__popc(chosen[w]));
  }
}

// Selects what travels of a finite chunk into kept and indices; all threads call it, the words are 0.
template <bool kIsDct>
__device__ __forceinline__ void select_kept(const Chunk<kIsDct>& chunk, const float* values, uint32_t largest,
                                            ChunkEncoding& encoding) {
  const auto num_coded = static_cast<uint32_t>(chunk.num_coded()), needed = static_cast<uint32_t>(chunk.num_kept());
  // Magnitudes from `low` on are enough, and from `high` on too few.
  uint32_t low = 0, high = largest + 1, num_low = num_coded, num_high = 0, stride = kChunkHalfAnOctave, step = 0;
#pragma unroll 1
  while (num_low != needed && high - low > 1) {
    const bool has_stride = stride < high - low;
    const uint32_t middle = has_stride ? high - stride : low + (high - low) / 2;
    const uint32_t num = num_at_least(chunk, values, middle, encoding.counts[step++ % 2]);
    if (num >= needed) {
      low = middle;
      num_low = num;
      stride = kAllMagnitudes;
    } else {
      high = middle;
      num_high = num;
      if (has_stride) stride *= 2;
    }
  }
  const bool is_exact = num_low == needed;
#pragma unroll
  for (int q = 0; q < kChunkQuads; ++q) {
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kQuadNumel; ++i) {
      const int at = q * kQuadNumel + i;
      const uint32_t magnitude = bits_of_magnitude(values[at]);
      if (!chunk.has_coded(at) || magnitude < low) continue;
      if (is_exact || magnitude > low) {
        above |= 1u << i;
      } else {
        equal |= 1u << i;
      }
    }
    const int index = chunk_index(q * kQuadNumel), shift = index % kChunkWordBits;
    if (above != 0) atomicOr(&encoding.above[index / kChunkWordBits], above << shift);
    if (equal != 0) atomicOr(&encoding.equal[index / kChunkWordBits], equal << shift);
  }
  __syncthreads();
  if (warp_index() == 0) choose_ties(needed - num_high, encoding);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    const int index = chunk_index(i);
    const uint32_t word = encoding.above[index / kChunkWordBits], bit = 1u << index % kChunkWordBits;
    if ((word & bit) == 0) continue;
    const uint32_t j = encoding.num_before[index / kChunkWordBits] + static_cast<uint32_t>(__popc(word & (bit - 1)));
    encoding.kept[j] = values[i];
    encoding.indices[j] = static_cast<uint16_t>(index);
  }
  __syncthreads();
}

// The mean of the kept magnitudes that `takes` holds for; it is not a number where there are none. The first warp
// calls it, a lane for each of the contract.
template <typename Takes>
__device__ __forceinline__ double mean_of_kept(int kept, const ChunkEncoding& encoding, Takes takes) {
  double sum = 0;
  uint32_t count = 0;
  for (int j = lane_index(); j < kept; j += kWarpNumThreads) {
    const double magnitude = static_cast<double>(absolute(encoding.kept[j]));
    if (!takes(magnitude)) continue;
    sum += magnitude;
    ++count;
  }
#pragma unroll
  for (int distance = kWarpNumThreads / 2; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, distance);
  }
  count = __reduce_add_sync(kAllLanes, count);
  return __shfl_sync(kAllLanes, sum, 0) / static_cast<double>(count);
}

__device__ __forceinline__ float level_of(double mean) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(mean)) & 0xffff0000u);
}

// The first warp calls it.
__device__ __forceinline__ Levels levels_of_kept(int kept, const ChunkEncoding& encoding) {
  const double mean = mean_of_kept(kept, encoding, [](double) { return true; });
  const double lower = mean_of_kept(kept, encoding, [=](double magnitude) { return magnitude <= mean; });
  const double upper = mean_of_kept(kept, encoding, [=](double magnitude) { return magnitude > mean; });
  return {level_of(lower), level_of(upper == upper ? upper : lower)};
}

// Stores kept and indices as a message; all threads call it.
template <bool kIsDct>
__device__ __forceinline__ void store_message(const Chunk<kIsDct>& chunk, bool is_finite, uint8_t* bytes,
                                              ChunkEncoding& encoding) {
  const int kept = chunk.num_kept(), j = thread_index();
  if (chunk.format.has_2_bits) {
    if (warp_index() == 0) {
      const Levels levels = is_finite ? levels_of_kept(kept, encoding) : Levels{kNan, kNan};
      if (lane_index() == 0) encoding.levels = levels;
    }
    __syncthreads();
    const Levels levels = encoding.levels;
    if (j == 0) {
      store_bytes(std::bit_cast<uint32_t>(levels.lower) >> 16, 2, bytes);
      store_bytes(std::bit_cast<uint32_t>(levels.upper) >> 16, 2, bytes + 2);
    }
    if (j < (kept + 3) / 4) {
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_there = is_finite && 4 * j + i < kept;
        if (is_there) codes |= levels.code_of(encoding.kept[4 * j + i]) << (2 * i);
      }
      bytes[kTopkChunkLevelBytes + j] = static_cast<uint8_t>(codes);
    }
  } else if (j < kept) {
    store_f32(encoding.kept[j], bytes + 4 * j);
  }
  if (j < (kept + 1) / 2) {
    const bool is_pair = 2 * j + 1 < kept;
    const uint32_t second = is_pair ? encoding.indices[2 * j + 1] : 0u;
    const uint32_t pair = encoding.indices[2 * j] | second << kTopkChunkIndexBits;
    store_bytes(pair, is_pair ? 3 : 2, bytes + chunk.format.codes_bytes(static_cast<size_t>(kept)) + 3 * j);
  }
}

// Encodes the values, and makes `decoded` what the codes say, unless !kDecodes. Returns whether the chunk is finite.
// All threads call it.
template <bool kDecodes, bool kIsDct>
__device__ __forceinline__ bool encode_chunk(const Chunk<kIsDct>& chunk, const float* values, uint8_t* bytes,
                                             ChunkEncoding& encoding, float* decoded) {
  uint32_t largest = 0;  // bits; those of NaN are above all
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    const uint32_t magnitude = bits_of_magnitude(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  if (lane_index() == 0) encoding.largest[warp_index()] = largest;
  if (thread_index() < kChunkWords) encoding.above[thread_index()] = encoding.equal[thread_index()] = 0;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) largest = encoding.largest[w] > largest ? encoding.largest[w] : largest;
  const bool is_finite = largest < kF32Inf;
  if (is_finite) {
    select_kept(chunk, values, largest, encoding);
  } else {
    if (thread_index() < chunk.num_kept()) {
      encoding.kept[thread_index()] = kNan;
      encoding.indices[thread_index()] = static_cast<uint16_t>(thread_index());
    }
    __syncthreads();
  }
  store_message(chunk, is_finite, bytes, encoding);
  if constexpr (kDecodes) {
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
      const int index = chunk_index(i);
      const bool is_kept = (encoding.above[index / kChunkWordBits] >> index % kChunkWordBits & 1u) != 0;
      const float value =
          chunk.format.has_2_bits ? encoding.levels.value_of(encoding.levels.code_of(values[i])) : values[i];
      decoded[i] = !is_finite ? kNan : is_kept ? value : 0.0f;
    }
  }
  return is_finite;
}

// The elements of a chunk in shared memory, because those that travel lie anywhere.
struct ScatteredChunk {
  float values[kChunkNumel];

  __device__ __forceinline__ float& at(int index) { return values[index]; }
};
template <bool kIsDct>
using ChunkElements = std::conditional_t<kIsDct, DctTiles, ScatteredChunk>;

template <bool kIsDct>
struct ChunkMemory {
  ChunkElements<kIsDct> elements;
  ChunkEncoding encoding;
};

template <typename Elements>
__device__ __forceinline__ void load_elements(Elements& elements, float* values) {
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) values[i] = elements.at(chunk_index(i));
}
template <typename Elements>
__device__ __forceinline__ void store_elements(const float* values, Elements& elements) {
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) elements.at(chunk_index(i)) = values[i];
}

// The elements that the thread has of the coefficients in shared memory; all threads call it, after a barrier.
__device__ __forceinline__ void load_transformed_back(DctTiles& tiles, float largest, float* values) {
  dct_inverse(tiles);
  load_elements(tiles, values);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) values[i] = saturated(values[i] * kDctScale, largest);
}

// encode_chunk of the elements' coefficients, if kIsDct. While these are selected from, the tile between keeps the
// elements, for which there are no registers.
template <bool kIsDct, bool kDecodes>
__device__ __forceinline__ bool encode_elements(const Chunk<kIsDct>& chunk, float* values, uint8_t* bytes,
                                                ChunkMemory<kIsDct>& memory, float* decoded) {
  if constexpr (!kIsDct) {
    return encode_chunk<kDecodes>(chunk, values, bytes, memory.encoding, decoded);
  } else {
    DctTiles& tiles = memory.elements;
    float coefficients[kChunkElements];
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) coefficients[i] = values[i] * (1.0f / kDctScale);
    store_elements(coefficients, tiles);
    __syncthreads();
    dct_forward(tiles);
    if constexpr (kDecodes) store_elements(values, tiles.between);
    load_elements(tiles, coefficients);
    const bool is_finite = encode_chunk<kDecodes>(chunk, coefficients, bytes, memory.encoding, decoded);
    if constexpr (kDecodes) {
      store_elements(decoded, tiles);
      __syncthreads();
      load_elements(tiles.between, values);
      __syncthreads();
      load_transformed_back(tiles, largest_number(DType::kF32), decoded);
    }
    return is_finite;
  }
}

// Adds the residual to the values, encodes them and renews the residual.
template <bool kIsDct>
__device__ __forceinline__ bool encode_with_residual(const Chunk<kIsDct>& chunk, float* values,
                                                     const Residual& residual, uint8_t* bytes,
                                                     ChunkMemory<kIsDct>& memory) {
  float others[kChunkElements];
  if (residual.in != nullptr) {
    with_type(residual, [&](auto type) { chunk.template load<decltype(type)::value>(residual.in, others); });
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
      if (chunk.has(i)) values[i] += others[i];
    }
  }
  const bool is_finite = encode_elements<kIsDct, true>(chunk, values, bytes, memory, others);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) others[i] = values[i] - others[i];
  with_type(residual, [&](auto type) { chunk.template store<decltype(type)::value>(others, residual.out); });
  return is_finite;
}

template <bool kIsDct, DType kDType>
__global__ void __launch_bounds__(kNumThreads, chunk_blocks(kIsDct, false))
    encode_chunks_kernel(TopkChunk format, const void* source, size_t numel, uint8_t* bytes,
                         uint64_t* num_nonfinite_blocks) {
  auto& memory = shared_memory<ChunkMemory<kIsDct>>();
  const Chunk<kIsDct> chunk(format, numel);
  float values[kChunkElements];
  chunk.template load<kDType>(source, values);
  const bool is_finite = encode_elements<kIsDct, false>(chunk, values, bytes + chunk.offset_bytes, memory, nullptr);
  count_block(is_finite, num_nonfinite_blocks);
}

template <bool kIsDct, DType kDType>
__global__ void __launch_bounds__(kNumThreads, chunk_blocks(kIsDct, true))
    encode_chunks_with_residual_kernel(TopkChunk format, const void* source, Residual residual, size_t numel,
                                       uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& memory = shared_memory<ChunkMemory<kIsDct>>();
  const Chunk<kIsDct> chunk(format, numel);
  float values[kChunkElements];
  chunk.template load<kDType>(source, values);
  const bool is_finite = encode_with_residual(chunk, values, residual, bytes + chunk.offset_bytes, memory);
  count_block(is_finite, num_nonfinite_blocks);
}

// The coefficients or elements of a message; all threads call it.
template <typename Elements, bool kIsDct>
__device__ __forceinline__ void scatter(const Chunk<kIsDct>& chunk, const ChunkTraveller& traveller,
                                        Elements& elements) {
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) elements.at(chunk_index(i)) = traveller.is_marked ? kNan : 0.0f;
  __syncthreads();
  if (!traveller.is_marked && traveller.index < chunk.num_coded()) elements.at(traveller.index) = traveller.value;
  __syncthreads();
}

template <bool kIsDct, DType kDType>
__global__ void __launch_bounds__(kNumThreads)
    decode_chunks_kernel(TopkChunk format, const uint8_t* bytes, size_t numel, void* destination) {
  auto& elements = shared_memory<ChunkElements<kIsDct>>();
  const Chunk<kIsDct> chunk(format, numel);
  scatter(chunk, load_traveller(chunk, bytes + chunk.offset_bytes), elements);
  float values[kChunkElements];
  if constexpr (kIsDct) {
    load_transformed_back(elements, largest_number(kDType), values);
  } else {
    load_elements(elements, values);
  }
  chunk.template store<kDType>(values, destination);
}

// Adds what travels, or NaN to all elements of a marked chunk.
template <bool kIsDct>
__device__ __forceinline__ void add_traveller(const Chunk<kIsDct>& chunk, const ChunkTraveller& traveller,
                                              float* sums) {
  if (traveller.is_marked) {
    for (int i = thread_index(); i < chunk.numel; i += kNumThreads) sums[i] += kNan;
  } else if (traveller.index < chunk.numel) {
    sums[traveller.index] += traveller.value;
  }
}

// Adds the elements of a message to the thread's sums; all threads call it.
__device__ __forceinline__ void add_transformed_back(const Chunk<true>& chunk, const ChunkTraveller& traveller,
                                                     DctTiles& tiles, float* sums) {
  scatter(chunk, traveller, tiles);
  float values[kChunkElements];
  load_transformed_back(tiles, largest_number(DType::kF32), values);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) sums[i] += values[i];
}

template <bool kIsDct>
__global__ void __launch_bounds__(kNumThreads)
    decode_add_chunks_kernel(TopkChunk format, const uint8_t* bytes, size_t numel, float* accumulator) {
  const Chunk<kIsDct> chunk(format, numel);
  const ChunkTraveller traveller = load_traveller(chunk, bytes + chunk.offset_bytes);
  if constexpr (kIsDct) {
    auto& tiles = shared_memory<DctTiles>();
    float sums[kChunkElements];
    chunk.template load<DType::kF32>(accumulator, sums);
    add_transformed_back(chunk, traveller, tiles, sums);
    chunk.template store<DType::kF32>(sums, accumulator);
  } else {
    add_traveller(chunk, traveller, accumulator + chunk.begin);
  }
}

// Adds by rank: all threads are done with one contribution before the next is added, which is loaded meanwhile.
template <bool kIsDct, bool kHasResidual>
__global__ void __launch_bounds__(kNumThreads, chunk_blocks(kIsDct, kHasResidual))
    reduce_encode_chunks_kernel(TopkChunk format, Contributions contributions, Factor factor, Residual residual,
                                size_t numel, uint8_t* bytes, uint64_t* num_nonfinite_blocks) {
  auto& memory = shared_memory<ChunkMemory<kIsDct>>();
  const Chunk<kIsDct> chunk(format, numel);
  const uint8_t* from = contributions.codes + chunk.offset_bytes;
  ChunkTraveller next = load_traveller(chunk, from);
  float sums[kChunkElements] = {};
  if constexpr (!kIsDct) store_elements(sums, memory.elements);
  __syncthreads();
  for (int rank = 0; rank < contributions.count; ++rank) {
    const ChunkTraveller traveller = next;
    from += contributions.stride;
    if (rank + 1 < contributions.count) next = load_traveller(chunk, from);
    if constexpr (kIsDct) {
      add_transformed_back(chunk, traveller, memory.elements, sums);
    } else {
      add_traveller(chunk, traveller, memory.elements.values);
      __syncthreads();
    }
  }
  if constexpr (!kIsDct) load_elements(memory.elements, sums);
  factor.scale<kChunkElements>(sums);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (!chunk.has(i)) sums[i] = 0.0f;
  }
  bool is_finite;
  if constexpr (kHasResidual) {
    is_finite = encode_with_residual(chunk, sums, residual, bytes + chunk.offset_bytes, memory);
  } else {
    is_finite = encode_elements<kIsDct, false>(chunk, sums, bytes + chunk.offset_bytes, memory, nullptr);
  }
  count_block(is_finite, num_nonfinite_blocks);
}

constexpr const char* kTopkChunkName = "topk_chunk";

template <typename... Parameters>
void launch_chunks(Stream stream, size_t numel, void (*kernel)(TopkChunk, Parameters...), int option,
                   std::type_identity_t<Parameters>... arguments) {
  launch(kTopkChunkName, stream, ceil_div(numel, kTopkChunkNumel), kernel, TopkChunk::of(option), arguments...);
}

// Calls body(std::bool_constant<is_dct>): kernels are compiled with the transform and without it.
template <typename Body>
void for_transform(int option, Body body) {
  TopkChunk::of(option).is_dct ? body(std::true_type{}) : body(std::false_type{});
}

void topk_chunk_encode(int option, DType dtype, const void* source, size_t numel, uint8_t* bytes, CounterRng,
                       uint64_t* num_nonfinite_blocks, Stream stream) {
  for_transform(option, [=](auto is_dct) {
    for_float_type(dtype, [=](auto type) {
      launch_chunks(stream, numel, encode_chunks_kernel<decltype(is_dct)::value, decltype(type)::value>, option, source,
                    numel, bytes, num_nonfinite_blocks);
    });
  });
}

void topk_chunk_decode(int option, DType dtype, const uint8_t* bytes, size_t numel, void* destination, Stream stream) {
  for_transform(option, [=](auto is_dct) {
    for_float_type(dtype, [=](auto type) {
      launch_chunks(stream, numel, decode_chunks_kernel<decltype(is_dct)::value, decltype(type)::value>, option, bytes,
                    numel, destination);
    });
  });
}

void topk_chunk_decode_add(int option, const uint8_t* bytes, size_t numel, float* accumulator, Stream stream) {
  for_transform(option, [=](auto is_dct) {
    launch_chunks(stream, numel, decode_add_chunks_kernel<decltype(is_dct)::value>, option, bytes, numel, accumulator);
  });
}

void topk_chunk_encode_with_residual(int option, DType dtype, const void* source, const Residual& residual,
                                     size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite_blocks,
                                     Stream stream) {
  for_transform(option, [=, &residual](auto is_dct) {
    for_float_type(dtype, [=, &residual](auto type) {
      launch_chunks(stream, numel, encode_chunks_with_residual_kernel<decltype(is_dct)::value, decltype(type)::value>,
                    option, source, residual, numel, bytes, num_nonfinite_blocks);
    });
  });
}

void topk_chunk_reduce_encode(int option, const Contributions& contributions, double factor, const Residual& residual,
                              size_t numel, uint8_t* bytes, CounterRng, uint64_t* num_nonfinite_blocks, Stream stream) {
  for_transform(option, [=, &contributions, &residual](auto is_dct) {
    constexpr bool kIsDct = decltype(is_dct)::value;
    const auto kernel =
        residual.is_on() ? reduce_encode_chunks_kernel<kIsDct, true> : reduce_encode_chunks_kernel<kIsDct, false>;
    launch_chunks(stream, numel, kernel, option, contributions, Factor(factor), residual, numel, bytes,
                  num_nonfinite_blocks);
  });
}

}  // namespace

const BlockKernels kTopkChunk = {topk_chunk_encode, topk_chunk_decode, topk_chunk_decode_add,
                                 topk_chunk_encode_with_residual, topk_chunk_reduce_encode};

}  // namespace bagua::kernels::cuda

// CPU form of the sparsifier in chunks (contract and arithmetic: topk_chunk.h). The search for the threshold is in
// topk_select.h; all that comes after it touches the kept elements only. The transform is in dct.h.
#include "csrc/kernels/topk_chunk.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/dct.h"
#include "csrc/kernels/cpu/topk_select.h"

namespace bagua::kernels::cpu {
namespace topk_chunk {  // a name, because the tests compile the kernels of several files into one

using topk::magnitude_of;

namespace {

constexpr size_t kNumel = kTopkChunkNumel;
constexpr size_t kLanes = 32;

// The elements of a chunk that travel.
struct Kept {
  size_t count;
  uint16_t indices[kTopkMaxK];
  float values[kTopkMaxK];
};

// `source` has kNumel elements, of which `count` or more are the chunk's and those behind them +0, which no other
// element is smaller than. Returns whether the chunk is finite.
BAGUA_MULTIVERSION bool select_chunk(const float* __restrict source, size_t count, Kept& kept) {
  topk::Keys<kNumel> keys;
  kept.count = count;
  const uint32_t largest = topk::take_upper_keys(source, keys);
  if (largest >= kF32Inf) {
    for (size_t j = 0; j < count; ++j) {
      kept.indices[j] = static_cast<uint16_t>(j);
      kept.values[j] = kNan;
    }
    return false;
  }
  topk::list_selected<kNumel>(source, topk::select_largest(source, count, largest, keys), kept.indices);
  for (size_t j = 0; j < count; ++j) kept.values[j] = source[kept.indices[j]];
  return true;
}

// A magnitude of the message, as bf16.
struct Levels {
  uint16_t bits[2];  // lower, upper

  float of(bool is_upper) const { return bf16_to_f32(bits[is_upper]); }
  bool is_above(float magnitude) const { return magnitude > of(false) * 0.5f + of(true) * 0.5f; }
};

struct Mean {
  double sum;
  size_t count;
  double value() const { return sum / static_cast<double>(count); }
};

// The mean of the magnitudes that `takes` holds for.
template <typename Takes>
Mean mean_of(const Kept& kept, Takes takes) {
  double lanes[kLanes] = {};
  size_t count = 0;
  for (size_t j = 0; j < kept.count; ++j) {
    const double magnitude = static_cast<double>(std::bit_cast<float>(magnitude_of(kept.values[j])));
    if (!takes(magnitude)) continue;
    lanes[j % kLanes] += magnitude;
    ++count;
  }
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return {lanes[0], count};
}

uint16_t level_of(const Mean& mean) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(mean.value())) >> 16);
}

Levels levels_of(const Kept& kept) {
  const double mean = mean_of(kept, [](double) { return true; }).value();
  const Mean lower = mean_of(kept, [=](double magnitude) { return magnitude <= mean; });
  const Mean upper = mean_of(kept, [=](double magnitude) { return magnitude > mean; });
  return {{level_of(lower), level_of(upper.count > 0 ? upper : lower)}};
}

void store_levels_and_codes(const Kept& kept, bool is_finite, uint8_t* bytes) {
  constexpr uint16_t kMark = std::bit_cast<uint32_t>(kNan) >> 16;
  const Levels levels = is_finite ? levels_of(kept) : Levels{{kMark, kMark}};
  std::memcpy(bytes, levels.bits, kTopkChunkLevelBytes);
  uint8_t* codes = bytes + kTopkChunkLevelBytes;
  std::memset(codes, 0, (kept.count + 3) / 4);
  if (!is_finite) return;
  for (size_t j = 0; j < kept.count; ++j) {
    const uint32_t bits = std::bit_cast<uint32_t>(kept.values[j]);
    const uint32_t code = bits >> 31 | static_cast<uint32_t>(levels.is_above(std::bit_cast<float>(bits & kF32Abs)))
                                           << 1;
    codes[j / 4] = static_cast<uint8_t>(codes[j / 4] | code << (j % 4 * 2));
  }
}

// Returns whether the chunk is marked.
bool load_levels_and_codes(const uint8_t* bytes, Kept& kept) {
  Levels levels;
  std::memcpy(levels.bits, bytes, kTopkChunkLevelBytes);
  const uint8_t* codes = bytes + kTopkChunkLevelBytes;
  for (size_t j = 0; j < kept.count; ++j) {
    const uint32_t code = static_cast<uint32_t>(codes[j / 4]) >> (j % 4 * 2);
    kept.values[j] = std::bit_cast<float>(magnitude_of(levels.of((code & 2) != 0)) | code << 31);
  }
  return magnitude_of(levels.of(false)) >= kF32Inf || magnitude_of(levels.of(true)) >= kF32Inf;
}

// Two indices are three bytes.
void store_indices(const Kept& kept, uint8_t* bytes) {
  for (size_t j = 0; j < kept.count; j += 2) {
    const bool is_pair = j + 1 < kept.count;
    const uint32_t second = is_pair ? kept.indices[j + 1] : 0;
    const uint32_t pair = kept.indices[j] | second << kTopkChunkIndexBits;
    std::memcpy(bytes + j / 2 * 3, &pair, is_pair ? 3 : 2);
  }
}

void load_indices(const uint8_t* bytes, Kept& kept) {
  for (size_t j = 0; j < kept.count; j += 2) {
    const bool is_pair = j + 1 < kept.count;
    uint32_t pair = 0;
    std::memcpy(&pair, bytes + j / 2 * 3, is_pair ? 3 : 2);
    kept.indices[j] = pair & (kNumel - 1);
    if (is_pair) kept.indices[j + 1] = static_cast<uint16_t>(pair >> kTopkChunkIndexBits);
  }
}

// A NaN or an Inf among the elements makes at least one coefficient so.
BAGUA_MULTIVERSION void transform(const float* __restrict source, DctMatrix& coefficients) {
  std::memcpy(coefficients.of, source, sizeof(coefficients.of));
  dct_forward(coefficients);
}

BAGUA_MULTIVERSION void transform_back(const Kept& kept, DctMatrix& values) {
  std::memset(values.of, 0, sizeof(values.of));
  for (size_t j = 0; j < kept.count; ++j) values.of[kept.indices[j]] = kept.values[j];
  dct_inverse(values);
}

struct Blocks {
  static constexpr size_t kNumel = kTopkChunkNumel;
  static constexpr float kPadding = 0.0f;
  static constexpr bool kSaturates = true;
  const TopkChunk chunk;
  Blocks(int option, CounterRng) : chunk(TopkChunk::of(option)) {}

  size_t num_kept(size_t numel) const { return std::min(static_cast<size_t>(chunk.k), numel); }
  size_t wire_bytes() const { return chunk.chunk_bytes(kNumel); }
  size_t encoded_numel(size_t) const { return kNumel; }
  size_t decoded_numel(size_t numel) const { return numel; }

  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    DctMatrix coefficients;
    if (chunk.is_dct) {
      transform(source, coefficients);
      source = coefficients.of;
    }
    Kept kept;
    const bool is_finite = select_chunk(source, num_kept(numel), kept);
    if (chunk.has_2_bits) {
      store_levels_and_codes(kept, is_finite, bytes);
    } else {
      std::memcpy(bytes, kept.values, kept.count * sizeof(float));
    }
    store_indices(kept, bytes + chunk.codes_bytes(kept.count));
    return !is_finite;
  }
  // Returns whether the chunk is marked; then `kept` does not count.
  bool load(const uint8_t* bytes, size_t numel, Kept& kept) const {
    kept.count = num_kept(numel);
    load_indices(bytes + chunk.codes_bytes(kept.count), kept);
    if (chunk.has_2_bits) return load_levels_and_codes(bytes, kept);
    std::memcpy(kept.values, bytes, kept.count * sizeof(float));
    float first;
    std::memcpy(&first, bytes, sizeof(float));
    return magnitude_of(first) >= kF32Inf;
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    Kept kept;
    if (load(bytes, numel, kept)) {
      std::fill_n(destination, numel, kNan);
      return;
    }
    if (chunk.is_dct) {
      DctMatrix values;
      transform_back(kept, values);
      std::memcpy(destination, values.of, numel * sizeof(float));
      return;
    }
    std::memset(destination, 0, numel * sizeof(float));
    for (size_t j = 0; j < kept.count; ++j) {
      if (kept.indices[j] < numel) destination[kept.indices[j]] = kept.values[j];
    }
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    Kept kept;
    if (load(bytes, numel, kept)) return store_all<Store::kAdd>(kNan, numel, destination);
    if (chunk.is_dct) {
      DctMatrix values;
      transform_back(kept, values);
      for (size_t i = 0; i < numel; ++i) destination[i] += values.of[i];
      return;
    }
    for (size_t j = 0; j < kept.count; ++j) {
      if (kept.indices[j] < numel) destination[kept.indices[j]] += kept.values[j];
    }
  }
};

}  // namespace
}  // namespace topk_chunk

const BlockKernels kTopkChunk = kBlockKernels<topk_chunk::Blocks>;

}  // namespace bagua::kernels::cpu

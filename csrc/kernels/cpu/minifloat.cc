// CPU form of the small floats (contract and formula: minifloat.h). One block is 8 KB of f32 and stays in L1 between
// the pass that finds the norm and the pass that writes codes.
#include "csrc/kernels/minifloat.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/kernels/arithmetic/minifloat.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/prefetch.h"

namespace bagua::kernels::cpu {
namespace minifloat {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::minifloat;

namespace {

static_assert(std::endian::native == std::endian::little, "the header is stored as it lies in memory");

constexpr size_t kHeaderBytes = kMinifloatHeaderBytes;

// Elements whose codes share a byte.
template <Minifloat kType>
constexpr size_t kPerByte = 8 / minifloat_bits(kType);

// The bytes from `first` on of the codes of the `padded` elements.
template <Minifloat kType>
BAGUA_INLINE void encode_codes(const float* __restrict source, size_t padded, size_t first, size_t count,
                               const Steps& steps, uint8_t* __restrict codes) {
  source += first;
  codes += first;
  const float* __restrict upper = source + padded / 2;
  for (size_t j = 0; j < count; ++j) {
    uint32_t code = code_of<kType>(source[j], steps);
    if constexpr (kPerByte<kType> == 2) code |= code_of<kType>(upper[j], steps) << 4;
    codes[j] = static_cast<uint8_t>(code);
  }
}

// `source` has `padded` elements. Returns whether the block is finite.
template <Minifloat kType>
BAGUA_INLINE bool encode_block(const float* __restrict source, size_t padded, uint8_t* __restrict bytes) {
  const float* const next = source + kBlockNumel;
  uint32_t largest = 0;
  for (size_t i = 0; i < padded; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(source[i]) & kF32Abs;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  float norm = std::bit_cast<float>(largest);
  if (largest >= kF32Inf) {
    std::memcpy(bytes, &kNan, kHeaderBytes);
    std::memset(codes, 0, padded / kPerByte<kType>);
    return false;
  }
  std::memcpy(bytes, &norm, kHeaderBytes);
  alignas(64) float scaled[kBlockNumel];
  if (largest < kUnscaledNorm) {
    for (size_t i = 0; i < padded; ++i) scaled[i] = scale_up(source[i]);
    norm = scale_up(norm);
    source = scaled;
  }
  const Steps steps = steps_of<kType>(norm);
  constexpr size_t kPart = kPrefetchNumel / kPerByte<kType>;
  const size_t num_bytes = padded / kPerByte<kType>;
  for (size_t first = 0; first < num_bytes; first += kPart) {
    prefetch(next + first * kPerByte<kType>);
    encode_codes<kType>(source, padded, first, std::min(kPart, num_bytes - first), steps, codes);
  }
  return true;
}

// The elements whose codes stand kUp bits up in their bytes.
template <Minifloat kType, bool kIsApart, int kUp, Store kStore>
BAGUA_INLINE void decode_part(const uint8_t* __restrict codes, size_t numel, const Steps& steps,
                              float* __restrict destination) {
  constexpr uint32_t kMask = (1u << minifloat_bits(kType)) - 1;
  for (size_t j = 0; j < numel; ++j) {
    const uint32_t code = static_cast<uint32_t>(codes[j]) >> kUp & kMask;
    store<kStore>(value_of<kType, kIsApart>(code, steps), destination[j]);
  }
}

template <Minifloat kType, bool kIsApart, Store kStore>
BAGUA_INLINE void decode_parts(const uint8_t* __restrict codes, size_t padded, const Steps& steps,
                               float* __restrict destination) {
  const size_t part = padded / kPerByte<kType>;
  decode_part<kType, kIsApart, 0, kStore>(codes, part, steps, destination);
  if constexpr (kPerByte<kType> == 2) decode_part<kType, kIsApart, 4, kStore>(codes, part, steps, destination + part);
}

// M * step is, for most norms, the norm, and then no element has to be looked at for it.
template <Minifloat kType, Store kStore>
BAGUA_INLINE void decode_codes(const uint8_t* __restrict codes, size_t padded, float norm,
                               float* __restrict destination) {
  const Steps steps = steps_of<kType>(norm);
  if (static_cast<float>(format_of(kType).most) * steps.step == norm) {
    decode_parts<kType, false, kStore>(codes, padded, steps, destination);
  } else {
    decode_parts<kType, true, kStore>(codes, padded, steps, destination);
  }
}

// `destination` has `padded` elements.
template <Minifloat kType, Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* __restrict bytes, size_t padded, float* __restrict destination) {
  uint32_t magnitude;
  std::memcpy(&magnitude, bytes, kHeaderBytes);
  magnitude &= kF32Abs;
  if (magnitude >= kF32Inf) return store_all<kStore>(kNan, padded, destination);
  const float norm = std::bit_cast<float>(magnitude);
  if (magnitude >= kUnscaledNorm) return decode_codes<kType, kStore>(bytes + kHeaderBytes, padded, norm, destination);
  alignas(64) float scaled[kBlockNumel];
  decode_codes<kType, Store::kAssign>(bytes + kHeaderBytes, padded, scale_up(norm), scaled);
  for (size_t i = 0; i < padded; ++i) store<kStore>(scale_down(scaled[i]), destination[i]);
}

BAGUA_MULTIVERSION bool encode_e4m3(const float* source, size_t padded, uint8_t* bytes) {
  return encode_block<Minifloat::kE4M3>(source, padded, bytes);
}
BAGUA_MULTIVERSION bool encode_e5m2(const float* source, size_t padded, uint8_t* bytes) {
  return encode_block<Minifloat::kE5M2>(source, padded, bytes);
}
BAGUA_MULTIVERSION bool encode_e2m1(const float* source, size_t padded, uint8_t* bytes) {
  return encode_block<Minifloat::kE2M1>(source, padded, bytes);
}
BAGUA_MULTIVERSION bool encode_e3m0(const float* source, size_t padded, uint8_t* bytes) {
  return encode_block<Minifloat::kE3M0>(source, padded, bytes);
}
BAGUA_MULTIVERSION void assign_e4m3(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE4M3, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void assign_e5m2(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE5M2, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void assign_e2m1(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE2M1, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void assign_e3m0(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE3M0, Store::kAssign>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_e4m3(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE4M3, Store::kAdd>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_e5m2(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE5M2, Store::kAdd>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_e2m1(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE2M1, Store::kAdd>(bytes, padded, destination);
}
BAGUA_MULTIVERSION void add_e3m0(const uint8_t* bytes, size_t padded, float* destination) {
  decode_block<Minifloat::kE3M0, Store::kAdd>(bytes, padded, destination);
}

struct Bodies {
  size_t per_byte;
  bool (*encode)(const float* source, size_t padded, uint8_t* bytes);
  void (*assign)(const uint8_t* bytes, size_t padded, float* destination);
  void (*add)(const uint8_t* bytes, size_t padded, float* destination);
};
constexpr Bodies kBodies[kNumMinifloats] = {{1, encode_e4m3, assign_e4m3, add_e4m3},
                                            {1, encode_e5m2, assign_e5m2, add_e5m2},
                                            {2, encode_e2m1, assign_e2m1, add_e2m1},
                                            {2, encode_e3m0, assign_e3m0, add_e3m0}};

struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  static constexpr float kPadding = 0.0f;
  const Bodies& bodies;

  Blocks(int type, CounterRng) : bodies(kBodies[type]) {}
  size_t wire_bytes() const { return kHeaderBytes + kBlockNumel / bodies.per_byte; }
  size_t encoded_numel(size_t numel) const { return (numel + bodies.per_byte - 1) / bodies.per_byte * bodies.per_byte; }
  size_t decoded_numel(size_t numel) const { return encoded_numel(numel); }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !bodies.encode(source, encoded_numel(numel), bytes);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    bodies.assign(bytes, decoded_numel(numel), destination);
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    bodies.add(bytes, decoded_numel(numel), destination);
  }
};

}  // namespace
}  // namespace minifloat

const BlockKernels kMinifloat = kBlockKernels<minifloat::Blocks>;

}  // namespace bagua::kernels::cpu

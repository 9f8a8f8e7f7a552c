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

template <Minifloat kType>
BAGUA_INLINE void encode_codes(const float* __restrict source, size_t numel, const Steps& steps,
                               uint8_t* __restrict codes) {
  for (size_t j = 0; j < numel; ++j) codes[j] = static_cast<uint8_t>(code_of<kType>(source[j], steps));
}

// Returns whether the block is finite.
template <Minifloat kType>
BAGUA_INLINE bool encode_block(const float* __restrict source, size_t numel, uint8_t* __restrict bytes) {
  const float* const next = source + kBlockNumel;
  uint32_t largest = 0;
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(source[i]) & kF32Abs;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  float norm = std::bit_cast<float>(largest);
  if (largest >= kF32Inf) {
    std::memcpy(bytes, &kNan, kHeaderBytes);
    std::memset(codes, 0, numel);
    return false;
  }
  std::memcpy(bytes, &norm, kHeaderBytes);
  alignas(64) float scaled[kBlockNumel];
  if (largest < kUnscaledNorm) {
    for (size_t i = 0; i < numel; ++i) scaled[i] = scale_up(source[i]);
    norm = scale_up(norm);
    source = scaled;
  }
  const Steps steps = steps_of<kType>(norm);
  for (size_t first = 0; first < numel; first += kPrefetchNumel) {
    prefetch(next + first);
    encode_codes<kType>(source + first, std::min(kPrefetchNumel, numel - first), steps, codes + first);
  }
  return true;
}

template <Minifloat kType, bool kIsApart, Store kStore>
BAGUA_INLINE void decode_part(const uint8_t* __restrict codes, size_t numel, const Steps& steps,
                              float* __restrict destination) {
  for (size_t j = 0; j < numel; ++j) store<kStore>(value_of<kType, kIsApart>(codes[j], steps), destination[j]);
}

// M * step is, for most norms, the norm, and then no element has to be looked at for it.
template <Minifloat kType, Store kStore>
BAGUA_INLINE void decode_codes(const uint8_t* __restrict codes, size_t numel, float norm,
                               float* __restrict destination) {
  const Steps steps = steps_of<kType>(norm);
  if (static_cast<float>(format_of(kType).most) * steps.step == norm) {
    decode_part<kType, false, kStore>(codes, numel, steps, destination);
  } else {
    decode_part<kType, true, kStore>(codes, numel, steps, destination);
  }
}

template <Minifloat kType, Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* __restrict bytes, size_t numel, float* __restrict destination) {
  uint32_t magnitude;
  std::memcpy(&magnitude, bytes, kHeaderBytes);
  magnitude &= kF32Abs;
  if (magnitude >= kF32Inf) return store_all<kStore>(kNan, numel, destination);
  const float norm = std::bit_cast<float>(magnitude);
  if (magnitude >= kUnscaledNorm) return decode_codes<kType, kStore>(bytes + kHeaderBytes, numel, norm, destination);
  alignas(64) float scaled[kBlockNumel];
  decode_codes<kType, Store::kAssign>(bytes + kHeaderBytes, numel, scale_up(norm), scaled);
  for (size_t i = 0; i < numel; ++i) store<kStore>(scale_down(scaled[i]), destination[i]);
}

BAGUA_MULTIVERSION bool encode_e4m3(const float* source, size_t numel, uint8_t* bytes) {
  return encode_block<Minifloat::kE4M3>(source, numel, bytes);
}
BAGUA_MULTIVERSION bool encode_e5m2(const float* source, size_t numel, uint8_t* bytes) {
  return encode_block<Minifloat::kE5M2>(source, numel, bytes);
}
BAGUA_MULTIVERSION void assign_e4m3(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Minifloat::kE4M3, Store::kAssign>(bytes, numel, destination);
}
BAGUA_MULTIVERSION void assign_e5m2(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Minifloat::kE5M2, Store::kAssign>(bytes, numel, destination);
}
BAGUA_MULTIVERSION void add_e4m3(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Minifloat::kE4M3, Store::kAdd>(bytes, numel, destination);
}
BAGUA_MULTIVERSION void add_e5m2(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Minifloat::kE5M2, Store::kAdd>(bytes, numel, destination);
}

struct Bodies {
  bool (*encode)(const float* source, size_t numel, uint8_t* bytes);
  void (*assign)(const uint8_t* bytes, size_t numel, float* destination);
  void (*add)(const uint8_t* bytes, size_t numel, float* destination);
};
constexpr Bodies kBodies[kNumMinifloats] = {{encode_e4m3, assign_e4m3, add_e4m3}, {encode_e5m2, assign_e5m2, add_e5m2}};

struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  static constexpr float kPadding = 0.0f;
  const Bodies& bodies;

  Blocks(int type, CounterRng) : bodies(kBodies[type]) {}
  size_t wire_bytes() const { return kHeaderBytes + kBlockNumel; }
  size_t encoded_numel(size_t numel) const { return numel; }
  size_t decoded_numel(size_t numel) const { return numel; }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !bodies.encode(source, numel, bytes);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const {
    bodies.assign(bytes, numel, destination);
  }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const {
    bodies.add(bytes, numel, destination);
  }
};

}  // namespace
}  // namespace minifloat

const BlockKernels kMinifloat = kBlockKernels<minifloat::Blocks>;

}  // namespace bagua::kernels::cpu

// CPU form of the min-max quantiser (contract and formula: minmax_uint8.h). One block is 8 KB of f32 and
// stays in L1 between the pass that finds min and max and the pass that writes codes.
//
// Min and max are found on the integer image of the floats that orders like them (arithmetic/minmax_uint8.h): the
// reduction then vectorises without relaxed floating point, does not depend on the order of the comparisons, and NaN
// and Inf lie outside the images of the finite numbers, so the same two values detect them.
#include "csrc/kernels/minmax_uint8.h"

#include <bit>
#include <cstring>
#include <limits>

#include "csrc/kernels/arithmetic/minmax_uint8.h"
#include "csrc/kernels/backend.h"
#include "csrc/kernels/cpu/block_codec.h"
#include "csrc/kernels/cpu/prefetch.h"

namespace bagua::kernels::cpu {
namespace minmax_uint8 {  // a name, because the tests compile the kernels of several files into one

using namespace kernels::minmax_uint8;

namespace {

static_assert(std::endian::native == std::endian::little, "the header is stored as it lies in memory");

constexpr size_t kHeaderBytes = kMinmaxUint8HeaderBytes;

template <bool kIsScaled>
BAGUA_INLINE void encode_codes(const float* __restrict source, size_t numel, const Steps& steps,
                               uint8_t* __restrict codes) {
  for (size_t begin = 0; begin < numel; begin += kPrefetchNumel) {
    prefetch(source + kBlockNumel + begin);
    const size_t end = numel - begin < kPrefetchNumel ? numel : begin + kPrefetchNumel;
    for (size_t i = begin; i < end; ++i) codes[i] = code_of<kIsScaled>(source[i], steps);
  }
}

// Returns whether the block is finite.
BAGUA_MULTIVERSION bool encode_block(const float* __restrict source, size_t numel, uint8_t* __restrict bytes) {
  int32_t low = std::numeric_limits<int32_t>::max();
  int32_t high = std::numeric_limits<int32_t>::min();
  for (size_t i = 0; i < numel; ++i) {
    const int32_t key = ordered(std::bit_cast<int32_t>(source[i]));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  constexpr int32_t kInf = static_cast<int32_t>(kF32Inf);
  const bool finite = high < kInf && low > -kInf - 1;  // -kInf - 1 is the image of -Inf
  uint8_t* __restrict codes = bytes + kHeaderBytes;
  if (!finite) {
    const Header header{kNan, kNan};
    std::memcpy(bytes, &header, kHeaderBytes);
    std::memset(codes, 0, numel);
    return false;
  }
  const Header header{std::bit_cast<float>(ordered(low)), std::bit_cast<float>(ordered(high))};
  std::memcpy(bytes, &header, kHeaderBytes);
  const Steps steps = steps_of(header);
  if (steps.scale == 1.0f) {
    encode_codes<false>(source, numel, steps, codes);
  } else {
    encode_codes<true>(source, numel, steps, codes);
  }
  return true;
}

template <bool kIsScaled, bool kIsBelow, bool kIsAbove, Store kStore>
BAGUA_INLINE void decode_codes(const uint8_t* __restrict codes, size_t numel, const Steps& steps, Header header,
                               float* __restrict destination) {
  for (size_t i = 0; i < numel; ++i) {
    store<kStore>(value_of<kIsScaled, kIsBelow, kIsAbove>(codes[i], steps, header), destination[i]);
  }
}

template <Store kStore>
BAGUA_INLINE void decode_block(const uint8_t* __restrict bytes, size_t numel, float* __restrict destination) {
  Header header;
  std::memcpy(&header, bytes, kHeaderBytes);
  // False for a NaN in either bound, and for an Inf, which only a damaged message holds.
  const bool finite = header.min - header.min == 0.0f && header.max - header.max == 0.0f;
  if (!finite) return store_all<kStore>(kNan, numel, destination);
  if (header.min == header.max) return store_all<kStore>(header.min, numel, destination);
  const Steps steps = steps_of(header);
  const uint8_t* __restrict codes = bytes + kHeaderBytes;
  // The others lie between these two, so most blocks need one comparison or none.
  const bool is_below = value_of<false, false, false>(0, steps, header) < header.min;
  const bool is_above = value_of<false, false, false>(255, steps, header) > header.max;
  if (steps.scale != 1.0f) {
    decode_codes<true, true, true, kStore>(codes, numel, steps, header, destination);
  } else if (is_below && is_above) {
    decode_codes<false, true, true, kStore>(codes, numel, steps, header, destination);
  } else if (is_below) {
    decode_codes<false, true, false, kStore>(codes, numel, steps, header, destination);
  } else if (is_above) {
    decode_codes<false, false, true, kStore>(codes, numel, steps, header, destination);
  } else {
    decode_codes<false, false, false, kStore>(codes, numel, steps, header, destination);
  }
}

BAGUA_MULTIVERSION void assign(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Store::kAssign>(bytes, numel, destination);
}
BAGUA_MULTIVERSION void add(const uint8_t* bytes, size_t numel, float* destination) {
  decode_block<Store::kAdd>(bytes, numel, destination);
}

struct Blocks {
  static constexpr size_t kNumel = kBlockNumel;
  static constexpr float kPadding = 0.0f;
  Blocks(int, CounterRng) {}
  size_t wire_bytes() const { return kHeaderBytes + kBlockNumel; }
  size_t encoded_numel(size_t numel) const { return numel; }
  size_t decoded_numel(size_t numel) const { return numel; }
  size_t encode(const float* source, size_t, size_t numel, uint8_t* bytes) const {
    return !encode_block(source, numel, bytes);
  }
  void decode(const uint8_t* bytes, size_t numel, float* destination) const { assign(bytes, numel, destination); }
  void decode_add(const uint8_t* bytes, size_t numel, float* destination) const { add(bytes, numel, destination); }
};

}  // namespace
}  // namespace minmax_uint8

const BlockKernels kMinmaxUint8 = kBlockKernels<minmax_uint8::Blocks>;

}  // namespace bagua::kernels::cpu

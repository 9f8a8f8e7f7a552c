// Every registered codec against the contract of codec.h: wire size, blocks that can be cut apart,
// finite stays finite (but for casts), NaN and Inf marked and counted, fused decode_add, misaligned bytes, empty
// messages; then each codec's own error bound. A new codec is covered without touching this file except for its bound.
#include "csrc/codecs/codec.h"

#include <algorithm>
#include <functional>

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::expect_invalid_argument;
using testing::fill_random;
using testing::half_bits;
using testing::half_value;
using testing::kCpu;
using testing::kLargeSize;
using testing::kSmallSizes;
using testing::load_real;
using testing::same_bits;
using testing::store_real;

constexpr DType kCodecTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

void for_each_codec(const std::function<void(const Codec&, DType)>& body) {
  std::vector<std::string> specs = registered_codecs();
  specs.insert(specs.end(), {"qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=256", "topk:chunk=4096",
                             "topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,dct=1"});
  for (const std::string& spec : specs) {
    for (DType dtype : kCodecTypes) {
      SCOPED_TRACE(spec + " " + std::string(dtype_name(dtype)));
      body(get_codec(spec), dtype);
    }
  }
}

struct Coded {
  Coded(const Codec& codec, DType dtype, Array& source, size_t numel, size_t byte_skew)
      : bytes(codec.wire_bytes(numel, dtype), byte_skew), decoded(numel * item_bytes(dtype), item_bytes(dtype)) {
    num_nonfinite_blocks = codec.encode(source.data(), dtype, numel, bytes.data(), {}, kCpu);
    codec.decode(bytes.data(), dtype, numel, decoded.data(), kCpu);
    bytes.expect_canary();
    decoded.expect_canary();
  }
  Array bytes, decoded;
  size_t num_nonfinite_blocks;
};

TEST(Codecs, SizesAlignmentAndDeterminism) {
  for_each_codec([](const Codec& codec, DType dtype) {
    for (size_t numel : kSmallSizes) {
      Array source(numel * item_bytes(dtype), 0);
      fill_random(dtype, source.data(), numel, numel);
      Coded aligned(codec, dtype, source, numel, 0);
      EXPECT_EQ(aligned.num_nonfinite_blocks, 0u);
      EXPECT_EQ(aligned.bytes.size_bytes() == 0, numel == 0);
      for (size_t byte_skew : {1, 2, 3, 5}) {
        Coded skewed(codec, dtype, source, numel, byte_skew);
        EXPECT_TRUE(same_bits(aligned.bytes.data(), skewed.bytes.data(), aligned.bytes.size_bytes()));
        EXPECT_TRUE(same_bits(aligned.decoded.data(), skewed.decoded.data(), aligned.decoded.size_bytes()));
      }
    }
  });
}

TEST(Codecs, MessagesCutAtBlocks) {
  for_each_codec([](const Codec& codec, DType dtype) {
    const size_t numel = 5 * codec.block_numel() + (codec.block_numel() + 1) / 2;
    Array source(numel * item_bytes(dtype), 0);
    fill_random(dtype, source.data(), numel, 30);
    Coded whole(codec, dtype, source, numel, 0);
    for (size_t cut = codec.block_numel(); cut < numel; cut += codec.block_numel()) {
      const size_t head_bytes = codec.wire_bytes(cut, dtype), tail = numel - cut;
      ASSERT_EQ(head_bytes + codec.wire_bytes(tail, dtype), whole.bytes.size_bytes());
      Array parts(whole.bytes.size_bytes(), 1), decoded(tail * item_bytes(dtype), 0);
      codec.encode(source.data(), dtype, cut, parts.data(), {}, kCpu);
      codec.encode(source.data() + cut * item_bytes(dtype), dtype, tail, parts.data() + head_bytes, {0, cut}, kCpu);
      ASSERT_TRUE(same_bits(parts.data(), whole.bytes.data(), parts.size_bytes()));
      codec.decode(whole.bytes.data() + head_bytes, dtype, tail, decoded.data(), kCpu);
      ASSERT_TRUE(same_bits(decoded.data(), whole.decoded.data() + cut * item_bytes(dtype), decoded.size_bytes()));
    }
  });
}

// accumulator + decode in f32, where the f32 decode of the same bytes is the decoded value.
TEST(Codecs, DecodeAddIsDecodeThenAdd) {
  for_each_codec([](const Codec& codec, DType dtype) {
    for (size_t numel : {size_t{1}, size_t{33}, size_t{2049}, size_t{5000}}) {
      Array source(numel * item_bytes(dtype), 0), accumulator(numel * 4, 4);
      fill_random(dtype, source.data(), numel, 31);
      fill_random(DType::kF32, accumulator.data(), numel, 32);
      Coded coded(codec, dtype, source, numel, 1);
      std::vector<float> expected(numel);
      codec.decode(coded.bytes.data(), DType::kF32, numel, expected.data(), kCpu);
      for (size_t i = 0; i < numel; ++i) expected[i] += accumulator.as<float>()[i];
      codec.decode_add(coded.bytes.data(), dtype, numel, accumulator.as<float>(), kCpu);
      EXPECT_TRUE(same_bits(accumulator.data(), expected.data(), accumulator.size_bytes()));
      accumulator.expect_canary();
    }
  });
}

TEST(Codecs, FiniteStaysFinite) {
  for_each_codec([](const Codec& codec, DType dtype) {
    if (codec.block_numel() == 1) return;  // a cast, which overflows
    constexpr size_t kNumel = 65536;
    Array source(kNumel * item_bytes(dtype), 0);
    std::mt19937 random(33);
    for (size_t i = 0; i < kNumel; ++i) {  // every pattern of the 16-bit types, random ones of f32
      do testing::store_integer(dtype, source.data(), i, item_bytes(dtype) == 2 ? static_cast<int64_t>(i) : random());
      while (dtype == DType::kF32 && !std::isfinite(load_real(dtype, source.data(), i)));
      if (!std::isfinite(load_real(dtype, source.data(), i))) store_real(dtype, source.data(), i, 1.0);
    }
    Coded coded(codec, dtype, source, kNumel, 1);
    EXPECT_EQ(coded.num_nonfinite_blocks, 0u);
    for (size_t i = 0; i < kNumel; ++i) ASSERT_TRUE(std::isfinite(load_real(dtype, coded.decoded.data(), i))) << i;
  });
}

TEST(Codecs, ConstantsThatTheWireTypesHoldAreExact) {
  for_each_codec([](const Codec& codec, DType dtype) {
    if (codec.name() == "topk") return;  // sends some elements only
    for (double constant : {0.0, -0.0, 1.0, -0.375, 96.0}) {
      constexpr size_t kNumel = 3000;
      Array source(kNumel * item_bytes(dtype), 0);
      for (size_t i = 0; i < kNumel; ++i) store_real(dtype, source.data(), i, constant);
      Coded coded(codec, dtype, source, kNumel, 0);
      EXPECT_TRUE(same_bits(source.data(), coded.decoded.data(), source.size_bytes())) << constant;
    }
  });
}

TEST(Codecs, NonfiniteMarksAndCountsItsBlock) {
  for_each_codec([](const Codec& codec, DType dtype) {
    const size_t block = codec.block_numel(), numel = 4 * block + (block + 1) / 2;
    Array clean(numel * item_bytes(dtype), 0), source(numel * item_bytes(dtype), 0);
    fill_random(dtype, clean.data(), numel, 34);
    Coded expected(codec, dtype, clean, numel, 0);
    for (double special : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      for (size_t at : {size_t{0}, block - 1, block, numel - 1}) {
        source.assign(clean);
        store_real(dtype, source.data(), at, special);
        store_real(dtype, source.data(), 2 * block, special);
        Coded coded(codec, dtype, source, numel, 1);
        EXPECT_EQ(coded.num_nonfinite_blocks, 2u);
        Array sum(numel * 4, 0);
        codec.decode_add(coded.bytes.data(), dtype, numel, sum.as<float>(), kCpu);
        for (size_t i = 0; i < numel; ++i) {
          const bool marked = i / block == at / block || i / block == 2;
          const double value = load_real(dtype, coded.decoded.data(), i);
          const bool is_inf = block == 1 && std::isinf(special);  // a cast keeps it
          ASSERT_EQ(is_inf ? std::isinf(value) : std::isnan(value), marked) << i;
          ASSERT_EQ(is_inf ? std::isinf(sum.as<float>()[i]) : std::isnan(sum.as<float>()[i]), marked) << i;
          ASSERT_TRUE(marked || value == load_real(dtype, expected.decoded.data(), i)) << i;
        }
      }
    }
  });
}

TEST(Codecs, RejectsOtherTypes) {
  for (const std::string& name : registered_codecs()) {
    uint8_t buffer[64] = {}, bytes[64] = {};
    const Codec& codec = get_codec(name);
    expect_invalid_argument([&] { codec.encode(buffer, DType::kF64, 1, bytes, {}, kCpu); }, "float64");
    expect_invalid_argument([&] { codec.encode(buffer, DType::kI32, 1, bytes, {}, kCpu); }, "int32");
    expect_invalid_argument([&] { codec.decode(bytes, DType::kI64, 1, buffer, kCpu); }, "int64");
  }
}

struct HalfCase {
  const char* name;
  DType wire;
};
constexpr HalfCase kHalfCases[] = {{"fp16", DType::kF16}, {"bf16", DType::kBF16}};

TEST(HalfCodecs, BytesAreTheRoundedNumbers) {
  for (const HalfCase& one : kHalfCases) {
    const Codec& codec = get_codec(one.name);
    EXPECT_EQ(codec.block_numel(), 1u);
    EXPECT_EQ(codec.wire_bytes(1001, DType::kF32), 2002u);
    Array source(kLargeSize * 4, 4);
    fill_random(DType::kF32, source.data(), kLargeSize, 35);
    Coded coded(codec, DType::kF32, source, kLargeSize, 1);
    for (size_t i = 0; i < kLargeSize; ++i) {
      uint16_t bits;
      std::memcpy(&bits, coded.bytes.data() + 2 * i, 2);
      const uint16_t expected = half_bits(one.wire, load_real(DType::kF32, source.data(), i));
      ASSERT_EQ(bits, expected);
      ASSERT_EQ(load_real(DType::kF32, coded.decoded.data(), i), half_value(one.wire, expected));
    }
  }
}

TEST(HalfCodecs, OverflowAsACastDoes) {
  for (const HalfCase& one : kHalfCases) {
    const double largest = testing::half_format(one.wire).largest;
    const float values[] = {std::numeric_limits<float>::max(), -std::numeric_limits<float>::max(),
                            static_cast<float>(largest), static_cast<float>(-largest)};
    Array source(sizeof(values), 0);
    std::memcpy(source.data(), values, sizeof(values));
    Coded coded(get_codec(one.name), DType::kF32, source, 4, 0);
    EXPECT_EQ(coded.num_nonfinite_blocks, 2u);
    for (size_t i = 0; i < 4; ++i) {
      const double magnitude = i < 2 ? HUGE_VAL : largest;
      EXPECT_EQ(load_real(DType::kF32, coded.decoded.data(), i), i % 2 ? -magnitude : magnitude) << one.name;
    }
  }
  // 65504 rounds up to 65536 in bf16, which f16 does not hold.
  Array source(2, 0);
  store_real(DType::kF16, source.data(), 0, 65504);
  Coded coded(get_codec("bf16"), DType::kF16, source, 1, 0);
  EXPECT_EQ(load_real(DType::kF16, coded.decoded.data(), 0), HUGE_VAL);
}

TEST(MinmaxUint8Codec, SizeAndBound) {
  const Codec& codec = get_codec("minmax_uint8");
  EXPECT_EQ(codec.block_numel(), 2048u);
  EXPECT_EQ(codec.wire_bytes(0, DType::kF32), 0u);
  EXPECT_EQ(codec.wire_bytes(1, DType::kF16), 9u);
  EXPECT_EQ(codec.wire_bytes(2049, DType::kF32), 2049u + 16u);
  for (DType dtype : kCodecTypes) {
    Array source(kLargeSize * item_bytes(dtype), 0);
    fill_random(dtype, source.data(), kLargeSize, 36);
    Coded coded(codec, dtype, source, kLargeSize, 0);
    const double ulp = dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    for (size_t begin = 0; begin < kLargeSize; begin += 2048) {
      double low = HUGE_VAL, high = -HUGE_VAL;
      for (size_t i = begin; i < begin + 2048; ++i) {
        low = std::min(low, load_real(dtype, source.data(), i));
        high = std::max(high, load_real(dtype, source.data(), i));
      }
      const double bound = (high - low) / 510 * (1 + 1e-4) + std::max(-low, high) * ulp;
      for (size_t i = begin; i < begin + 2048; ++i) {
        ASSERT_LE(std::fabs(load_real(dtype, source.data(), i) - load_real(dtype, coded.decoded.data(), i)), bound);
      }
    }
  }
}

}  // namespace
}  // namespace bagua

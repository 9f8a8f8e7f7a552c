// The fused steps of a compressed all-reduce (fused.h), of every codec: bit for bit what its other functions give one
// after the other, over types, sizes, misalignments, numbers of contributions and residuals, in place and apart.
#include "csrc/kernels/fused.h"

#include <functional>
#include <optional>

#include "csrc/codecs/codec.h"
#include "csrc/kernels/cast.h"
#include "csrc/kernels/reduce.h"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::Contributions;
using kernels::Residual;
using testing::Array;
using testing::expect_invalid_argument;
using testing::fill_random;
using testing::kCpu;
using testing::kEncodable;
using testing::load_real;
using testing::same_bits;
using testing::store_real;

constexpr size_t kSizes[] = {0, 1, 3, 31, 33, 1025, 2047, 2048, 2049, 5000};
constexpr CounterRng kRng{77, 4 * 2048};

void for_each_codec(const std::function<void(const Codec&)>& body) {
  std::vector<std::string> specs = registered_codecs();
  specs.insert(specs.end(), {"qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=256", "topk:chunk=4096",
                             "topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,dct=1"});
  for (const std::string& spec : specs) {
    SCOPED_TRACE(spec);
    body(get_codec(spec));
  }
}

// The payload of a NaN that arithmetic made is the compiler's choice.
void expect_same(DType dtype, Array& got, Array& expected, const char* what) {
  got.expect_canary();
  for (size_t i = 0; i < expected.size_bytes() / item_bytes(dtype); ++i) {
    const size_t at = i * item_bytes(dtype);
    if (std::isnan(load_real(dtype, expected.data(), i)) && std::isnan(load_real(dtype, got.data(), i))) continue;
    ASSERT_TRUE(same_bits(got.data() + at, expected.data() + at, item_bytes(dtype)))
        << what << " at " << i << ": " << load_real(dtype, got.data(), i) << " instead of "
        << load_real(dtype, expected.data(), i);
  }
}

struct Encoded {
  size_t num_nonfinite;
  std::vector<uint8_t> bytes;
  std::vector<float> left;  // what the codes do not say
};

// Computes by the definition: the total of every element, the codec's own codes, and what these lack.
Encoded encode_totals(const Codec& codec, std::vector<float> totals, Array* residual, DType residual_dtype) {
  const size_t numel = totals.size();
  for (size_t i = 0; i < numel && residual != nullptr; ++i) {
    totals[i] = static_cast<float>(load_real(residual_dtype, residual->data(), i)) + totals[i];
  }
  Encoded result{0, std::vector<uint8_t>(codec.wire_bytes(numel, DType::kF32)), totals};
  result.num_nonfinite = codec.encode(totals.data(), DType::kF32, numel, result.bytes.data(), kRng, kCpu);
  std::vector<float> decoded(numel);
  codec.decode(result.bytes.data(), DType::kF32, numel, decoded.data(), kCpu);
  for (size_t i = 0; i < numel; ++i) result.left[i] -= decoded[i];
  return result;
}

struct Feedback {
  DType dtype;
  bool in_place;
  bool has_in = true;
};
constexpr Feedback kFeedbacks[] = {{DType::kF32, true},
                                   {DType::kF32, false},
                                   {DType::kBF16, true},
                                   {DType::kBF16, false},
                                   {DType::kF32, false, false}};

// Runs `fused` with a residual that is misaligned by `skew` elements, or, for bf16, bytes; compares codes, count and
// residual.
void expect_fused(const Codec& codec, const std::vector<float>& values, std::optional<Feedback> feedback, size_t skew,
                  const std::function<size_t(const Residual&, uint8_t*)>& fused) {
  const size_t numel = values.size();
  const Feedback chosen = feedback.value_or(Feedback{DType::kF32, false});
  const size_t residual_skew = chosen.dtype == DType::kF32 ? 4 * skew : skew;
  Array in(numel * item_bytes(chosen.dtype), residual_skew), out(in.size_bytes(), residual_skew);
  fill_random(chosen.dtype, in.data(), numel, 8);
  const bool adds = feedback.has_value() && chosen.has_in;
  const Encoded expected = encode_totals(codec, values, adds ? &in : nullptr, chosen.dtype);
  Array bytes(expected.bytes.size(), skew), left(in.size_bytes(), 0);
  kernels::cast(DType::kF32, expected.left.data(), chosen.dtype, left.data(), numel, kCpu);
  Array& renewed = chosen.in_place ? in : out;
  Residual residual;
  if (feedback.has_value()) residual = {chosen.has_in ? in.data() : nullptr, renewed.data(), chosen.dtype};
  EXPECT_EQ(fused(residual, bytes.data()), expected.num_nonfinite);
  bytes.expect_canary();
  ASSERT_TRUE(same_bits(bytes.data(), expected.bytes.data(), expected.bytes.size()));
  if (feedback.has_value()) expect_same(chosen.dtype, renewed, left, "the residual");
}

std::vector<float> values_of(DType dtype, Array& array, size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<float>(load_real(dtype, array.data(), i));
  return values;
}

TEST(Fused, EncodeWithResidualIsTheComposition) {
  for_each_codec([](const Codec& codec) {
    for (DType dtype : kEncodable) {
      for (size_t numel : kSizes) {
        for (size_t f = 0; f < std::size(kFeedbacks); ++f) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + std::to_string(numel) + " feedback " + std::to_string(f));
          const size_t skew = (numel + f) % 4;
          Array source(numel * item_bytes(dtype), dtype == DType::kF32 ? 4 * skew : skew);
          fill_random(dtype, source.data(), numel, numel + 1);
          expect_fused(codec, values_of(dtype, source, numel), kFeedbacks[f], skew,
                       [&](const Residual& residual, uint8_t* bytes) {
                         return codec.encode_with_residual(source.data(), dtype, residual, numel, bytes, kRng, kCpu);
                       });
        }
      }
    }
  });
}

// `contributions` of every rank, some behind one another with a gap that misaligns them.
void expect_reduction(const Codec& codec, DType sent, int count, double factor, size_t numel, size_t skew,
                      std::optional<Feedback> feedback, double special = 1) {
  SCOPED_TRACE(std::string(dtype_name(sent)) + ", " + std::to_string(count) + " contributions of " +
               std::to_string(numel) + ", factor " + std::to_string(factor));
  const size_t stride = codec.wire_bytes(numel, sent) + skew;
  Array codes(stride * static_cast<size_t>(count), skew);
  std::vector<float> sums(numel, 0.0f);
  for (int rank = 0; rank < count; ++rank) {
    Array source(numel * item_bytes(sent), 0);
    fill_random(sent, source.data(), numel, 50 + static_cast<uint64_t>(rank));
    if (numel > 0 && rank == count / 2) store_real(sent, source.data(), numel / 2, special);
    uint8_t* bytes = codes.data() + stride * static_cast<size_t>(rank);
    codec.encode(source.data(), sent, numel, bytes, {static_cast<uint64_t>(rank), 0}, kCpu);
    codec.decode_add(bytes, sent, numel, sums.data(), kCpu);
  }
  if (factor != 1) kernels::scale(DType::kF32, sums.data(), factor, numel, kCpu);
  const Contributions contributions{codes.data(), stride, count};
  expect_fused(codec, sums, feedback, skew, [&](const Residual& residual, uint8_t* bytes) {
    return codec.reduce_encode(contributions, sent, factor, residual, numel, bytes, kRng, kCpu);
  });
}

TEST(Fused, ReduceEncodeIsTheComposition) {
  for_each_codec([](const Codec& codec) {
    size_t turn = 0;
    for (size_t numel : kSizes) {
      for (int count = 1; count <= 9; ++count, ++turn) {
        const std::optional<Feedback> feedback =
            turn % 6 == 5 ? std::nullopt : std::optional<Feedback>(kFeedbacks[turn % 6]);
        expect_reduction(codec, kEncodable[turn % 3], count, turn % 2 ? 1.0 : 1.0 / count, numel, turn % 4, feedback);
      }
    }
  });
}

TEST(Fused, NonfiniteBlocksAreMarkedAndCounted) {
  for_each_codec([](const Codec& codec) {
    for (double special : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      for (size_t f = 0; f < std::size(kFeedbacks); ++f) {
        expect_reduction(codec, DType::kF32, 3, 1.0 / 3, 5000, 1, kFeedbacks[f], special);
      }
      expect_reduction(codec, DType::kBF16, 2, 1.0, 2049, 0, std::nullopt, special);
    }
  });
}

// Sums begin at +0: what is never added to, and what adds -0, is +0 on the wire.
TEST(Fused, SumsOfNegativeZerosArePositive) {
  for (const char* spec : {"minmax_uint8", "qsgd", "onebit", "centroid", "topk:k=8", "topk:chunk=4096,k=64,bits=2",
                           "topk:chunk=4096,dct=1", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"}) {
    const Codec& codec = get_codec(spec);
    const std::vector<float> zeros(2100, -0.0f);
    std::vector<uint8_t> contribution(codec.wire_bytes(zeros.size(), DType::kF32)), bytes(contribution.size());
    codec.encode(zeros.data(), DType::kF32, zeros.size(), contribution.data(), {}, kCpu);
    codec.reduce_encode({contribution.data(), 0, 2}, DType::kF32, 0.5, {}, zeros.size(), bytes.data(), {}, kCpu);
    std::vector<float> decoded(zeros.size());
    codec.decode(bytes.data(), DType::kF32, decoded.size(), decoded.data(), kCpu);
    for (float value : decoded) ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u) << spec;
  }
}

TEST(Fused, RejectsWhatItCannotDo) {
  float values[4] = {}, left[4] = {};
  uint8_t bytes[64] = {};
  for_each_codec([&](const Codec& codec) {
    const auto encode = [&](DType dtype, const Residual& residual) {
      codec.encode_with_residual(values, dtype, residual, 4, bytes, {}, kCpu);
    };
    expect_invalid_argument([&] { encode(DType::kF32, {}); }, "residual.out is null");
    expect_invalid_argument([&] { encode(DType::kF32, {left, left, DType::kF16}); }, "residual.dtype is float16");
    expect_invalid_argument([&] { encode(DType::kI64, {left, left, DType::kF32}); }, "int64");
    const auto reduce = [&](const Contributions& contributions, const Residual& residual) {
      codec.reduce_encode(contributions, DType::kF32, 1.0, residual, 4, bytes, {}, kCpu);
    };
    expect_invalid_argument([&] { reduce({bytes, 0, 0}, {}); }, "contributions.count is 0");
    expect_invalid_argument([&] { reduce({bytes, 0, 1}, {left, left, DType::kF64}); }, "residual.dtype is float64");
  });
  const auto at_element_5 = [&] {
    get_codec("qsgd").reduce_encode({bytes, 0, 1}, DType::kF32, 1.0, {}, 4, bytes, {0, 5}, kCpu);
  };
  expect_invalid_argument(at_element_5, "begins at element 5");
}

}  // namespace
}  // namespace bagua

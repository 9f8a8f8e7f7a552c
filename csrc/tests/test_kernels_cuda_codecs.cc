// The CUDA kernels of the block-wise codecs, on fibres: bit for bit what the CPU's give, over types, sizes,
// misalignments, values that break others, contributions and residuals, between pages that fault.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/tests/test_kernels_cuda.h"

#define cuda cuda_on_fibres
#include "csrc/kernels/cuda/centroid.cu"
#include "csrc/kernels/cuda/minifloat.cu"
#include "csrc/kernels/cuda/minmax_uint8.cu"
#include "csrc/kernels/cuda/onebit.cu"
#include "csrc/kernels/cuda/qsgd.cu"
#include "csrc/kernels/cuda/topk.cu"
#include "csrc/kernels/cuda/topk_chunk.cu"
#undef cuda

namespace bagua {
namespace {

using cuda_emulation::counters;
using kernels::Contributions;
using kernels::Residual;
using testing::expect_bits;
using testing::GuardedArray;
using testing::kCpu;
using testing::kCudaStream;
using testing::kEncodable;
using testing::store_real;
using testing::values_of_kind;

constexpr size_t kSizes[] = {0, 1, 2, 3, 5, 31, 33, 1023, 1025, 2047, 2048, 2049, 4096 + 77};
constexpr CounterRng kRng{0x1234567890abcdefu, 6 * 2048};

struct Case {
  std::string name;
  const kernels::BlockKernels &host, &device;
  int option;
  size_t (*wire_bytes_of)(size_t numel, int option);

  size_t wire_bytes(size_t numel) const { return wire_bytes_of(numel, option); }
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> list = {
        {"centroid", kernels::kCentroid, kernels::cuda_on_fibres::kCentroid, 0,
         [](size_t numel, int) { return kernels::centroid_wire_bytes(numel); }},
        {"minmax_uint8", kernels::kMinmaxUint8, kernels::cuda_on_fibres::kMinmaxUint8, 0,
         [](size_t numel, int) { return kernels::minmax_uint8_wire_bytes(numel); }},
        {"onebit", kernels::kOnebit, kernels::cuda_on_fibres::kOnebit, 0,
         [](size_t numel, int) { return kernels::onebit_wire_bytes(numel); }},
    };
    for (int type = 0; type < kernels::kNumMinifloats; ++type) {
      list.push_back({"minifloat:" + std::to_string(type), kernels::kMinifloat, kernels::cuda_on_fibres::kMinifloat,
                      type, kernels::minifloat_wire_bytes});
    }
    for (int bits : {8, 4, 2}) {
      list.push_back({"qsgd:bits=" + std::to_string(bits), kernels::kQsgd, kernels::cuda_on_fibres::kQsgd, bits,
                      kernels::qsgd_wire_bytes});
    }
    for (int k : {8, 16, 32, 64, 128, 256}) {
      list.push_back(
          {"topk:k=" + std::to_string(k), kernels::kTopk, kernels::cuda_on_fibres::kTopk, k, kernels::topk_wire_bytes});
    }
    using Chunk = kernels::TopkChunk;
    for (const Chunk& chunk : {Chunk{8, false}, Chunk{8, true}, Chunk{64, false}, Chunk{64, true}, Chunk{256, false},
                               Chunk{256, true}, Chunk{32, false, true}, Chunk{64, true, true}}) {
      list.push_back({"topk:chunk=4096,k=" + std::to_string(chunk.k) + (chunk.has_2_bits ? ",bits=2" : "") +
                          (chunk.is_dct ? ",dct=1" : ""),
                      kernels::kTopkChunk, kernels::cuda_on_fibres::kTopkChunk, chunk.option(),
                      kernels::topk_chunk_wire_bytes});
    }
    return list;
  }();
  return all;
}

// Skews are even bytes where the type asks for it: f32 is aligned to the element.
size_t skew_of(DType dtype, size_t skew) { return dtype == DType::kF32 ? 4 * skew % 16 : skew; }

std::vector<uint8_t> stored(DType dtype, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * item_bytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) store_real(dtype, bytes.data(), i, values[i]);
  return bytes;
}

// The body makes one launch, or none of nothing.
template <typename Body>
void expect_one_launch(size_t numel, Body body) {
  const size_t before = counters.num_launches;
  body();
  EXPECT_EQ(counters.num_launches - before, numel > 0 ? 1u : 0u);
  EXPECT_TRUE(numel == 0 || counters.launched_in == kCudaStream.handle);
}

class CudaCodecs : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { BAGUA_SKIP_WITHOUT_FIBRES(); }
  const Case& codec() const { return cases()[GetParam()]; }

  void expect_encode_and_decode(DType dtype, const std::vector<float>& values, size_t skew) const;
  void expect_same_decoded(const std::vector<uint8_t>& codes, size_t numel, int count) const;
  void expect_encode_with_residual(DType dtype, const std::vector<float>& values, DType residual_dtype, bool in_place,
                                   bool has_in, size_t skew) const;
  void expect_reduce_encode(DType sent, int count, double factor, size_t numel, int kind, const Residual& residual_like,
                            bool in_place, size_t skew) const;
};

void CudaCodecs::expect_encode_and_decode(DType dtype, const std::vector<float>& values, size_t skew) const {
  const size_t numel = values.size(), wire_bytes = codec().wire_bytes(numel);
  const std::vector<uint8_t> source = stored(dtype, values);
  std::vector<uint8_t> bytes(wire_bytes), decoded(source.size());
  std::vector<float> sums(numel, -0.0f);
  uint64_t num_nonfinite = 7;
  codec().host.encode(codec().option, dtype, source.data(), numel, bytes.data(), kRng, &num_nonfinite, kCpu);
  codec().host.decode(codec().option, dtype, bytes.data(), numel, decoded.data(), kCpu);
  codec().host.decode_add(codec().option, bytes.data(), numel, sums.data(), kCpu);

  GuardedArray device_source(source.size(), skew_of(dtype, skew)), device_bytes(wire_bytes, skew);
  GuardedArray device_decoded(source.size(), skew_of(dtype, skew)), device_sums(numel * 4, skew_of(DType::kF32, skew));
  device_source.assign(source.data());
  uint64_t device_num_nonfinite = 7;
  expect_one_launch(numel, [&] {
    codec().device.encode(codec().option, dtype, device_source.data(), numel, device_bytes.data(), kRng,
                          &device_num_nonfinite, kCudaStream);
  });
  EXPECT_EQ(device_num_nonfinite, num_nonfinite);
  ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kU8, device_bytes, bytes, false, "a byte of the message"));
  expect_one_launch(numel, [&] {
    codec().device.decode(codec().option, dtype, device_bytes.data(), numel, device_decoded.data(), kCudaStream);
  });
  ASSERT_NO_FATAL_FAILURE(expect_bits(dtype, device_decoded, decoded, false, "what is decoded"));
  for (size_t i = 0; i < numel; ++i) device_sums.as<float>()[i] = -0.0f;
  expect_one_launch(numel, [&] {
    codec().device.decode_add(codec().option, device_bytes.data(), numel, device_sums.as<float>(), kCudaStream);
  });
  expect_bits(DType::kF32, device_sums, stored(DType::kF32, sums), true, "a sum");
}

TEST_P(CudaCodecs, EncodeAndDecodeAreTheCpus) {
  size_t turn = 0;
  for (DType dtype : kEncodable) {
    for (size_t numel : kSizes) {
      for (int kind = 0; kind < testing::kNumKinds; ++kind, ++turn) {
        SCOPED_TRACE(codec().name + " " + std::string(dtype_name(dtype)) + " " + std::to_string(numel) + " kind " +
                     std::to_string(kind) + " skew " + std::to_string(turn % 5));
        expect_encode_and_decode(dtype, values_of_kind(kind, dtype, numel, turn), turn % 5);
        if (HasFailure()) return;
      }
    }
  }
}

// Whole blocks that are at the edge of what an encoder takes for usual.
std::vector<float> odd_blocks() {
  std::vector<float> values;
  const auto add = [&](auto value) {
    for (int i = 0; i < 2048; ++i) values.push_back(static_cast<float>(value(i)));
  };
  const std::vector<float> normal = testing::random_values(DType::kF32, 2048, 12);
  const auto at = [&](int i) { return normal[static_cast<size_t>(i)]; };
  for (int most : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257}) {
    add([&](int i) { return i >= 500 && i < 500 + most ? at(i) : 0.0f; });          // so few, side by side
    add([&](int i) { return i * 37 % 2048 < most ? 8.0f + at(i) : at(i); });        // or far apart, above all others
    add([&](int i) { return i < 8 * most ? (i % 2 != 0 ? -3.0f : 3.0f) : 0.5f; });  // equal ones
  }
  add([&](int i) { return i == 77 ? 0x1p100f : at(i); });               // one that is far above
  add([&](int i) { return std::ldexp(at(i), -(i * 29 % 2048) / 9); });  // of any magnitude, subnormal ones too
  add([&](int i) { return 1.0f + static_cast<float>(i % 300) * 0x1p-23f; });
  add([&](int i) { return i % 2 != 0 ? 0.0f : -0.0f; });
  add([&](int i) { return static_cast<float>(i % 255) + (i % 255 == 254 ? -0.5f : -1.5f); });
  add([&](int i) { return static_cast<float>(i % 256) - 1.5f; });  // the code of max is rounded to 256
  return values;
}

TEST_P(CudaCodecs, BlocksThatAreUnlikeOthersAreTheCpus) {
  const std::vector<float> values = odd_blocks();
  for (DType dtype : kEncodable) {
    SCOPED_TRACE(codec().name + " " + std::string(dtype_name(dtype)));
    expect_encode_and_decode(dtype, values, 0);
    expect_encode_with_residual(dtype, values, DType::kF32, false, false, 0);
    expect_encode_with_residual(dtype, values, DType::kBF16, true, true, 0);
    if (HasFailure()) return;
  }
}

// The codes of `count` messages, damaged as they may be: all three kernels that read them.
void CudaCodecs::expect_same_decoded(const std::vector<uint8_t>& codes, size_t numel, int count) const {
  const size_t wire_bytes = codec().wire_bytes(numel);
  std::vector<uint8_t> decoded(numel * 4), bytes(wire_bytes);
  std::vector<float> sums(numel, 1.0f);
  codec().host.decode(codec().option, DType::kF32, codes.data(), numel, decoded.data(), kCpu);
  codec().host.decode_add(codec().option, codes.data(), numel, sums.data(), kCpu);
  codec().host.reduce_encode(codec().option, {codes.data(), wire_bytes, count}, 1.0, {}, numel, bytes.data(), kRng,
                             nullptr, kCpu);
  GuardedArray device_codes(codes.size()), device_decoded(numel * 4), device_sums(numel * 4);
  GuardedArray device_bytes(wire_bytes);
  device_codes.assign(codes.data());
  for (size_t i = 0; i < numel; ++i) device_sums.as<float>()[i] = 1.0f;
  codec().device.decode(codec().option, DType::kF32, device_codes.data(), numel, device_decoded.data(), kCudaStream);
  codec().device.decode_add(codec().option, device_codes.data(), numel, device_sums.as<float>(), kCudaStream);
  codec().device.reduce_encode(codec().option, {device_codes.data(), wire_bytes, count}, 1.0, {}, numel,
                               device_bytes.data(), kRng, nullptr, kCudaStream);
  ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_decoded, decoded, false, "what is decoded"));
  ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_sums, stored(DType::kF32, sums), true, "a sum"));
  expect_bits(DType::kU8, device_bytes, bytes, false, "a byte of the message");
}

// Elements of a damaged message of topk that are not there are dropped, wherever it is read.
TEST_P(CudaCodecs, IndicesPastTheEndAreDropped) {
  if (!codec().name.starts_with("topk")) GTEST_SKIP() << "its codes hold no indices";
  if (codec().name.ends_with("dct=1")) GTEST_SKIP() << "all indices are of coefficients";
  const int count = 3;
  const bool has_chunks = codec().name.starts_with("topk:chunk");
  for (size_t numel : has_chunks ? std::vector<size_t>{300, 4096 + 300} : std::vector<size_t>{2048, 2048 + 300}) {
    const size_t wire_bytes = codec().wire_bytes(numel), kept = codec().wire_bytes(2048) / 6;
    std::vector<uint8_t> codes;
    for (int rank = 0; rank < count; ++rank) {
      std::vector<uint8_t> bytes(wire_bytes);
      const std::vector<float> values = testing::random_values(DType::kF32, numel, 40 + static_cast<uint64_t>(rank));
      codec().host.encode(codec().option, DType::kF32, stored(DType::kF32, values).data(), numel, bytes.data(), kRng,
                          nullptr, kCpu);
      for (size_t j = 0; j < kept && !has_chunks; j += 3) {
        bytes[4 * kept + 2 * j + 1] |= j % 2 != 0 ? 0x08 : 0xf8;  // 2048 and more
      }
      for (size_t j = 1; j <= 3 && has_chunks; ++j) bytes[wire_bytes - j] = 0xff;  // two that are 4095
      codes.insert(codes.end(), bytes.begin(), bytes.end());
    }
    expect_same_decoded(codes, numel, count);
    if (HasFailure()) return;
  }
}

void CudaCodecs::expect_encode_with_residual(DType dtype, const std::vector<float>& values, DType residual_dtype,
                                             bool in_place, bool has_in, size_t skew) const {
  const size_t numel = values.size(), wire_bytes = codec().wire_bytes(numel);
  const std::vector<uint8_t> source = stored(dtype, values);
  // Zeros to negative zeros: their sum is what padding must not change.
  const bool has_zeros = numel > 0 && values[0] == 0 && std::signbit(values[0]);
  const std::vector<uint8_t> residual = stored(
      residual_dtype, has_zeros ? std::vector<float>(numel, -0.0f) : testing::random_values(residual_dtype, numel, 5));
  std::vector<uint8_t> bytes(wire_bytes), left(residual.size());
  uint64_t num_nonfinite = 0, device_num_nonfinite = 0;
  codec().host.encode_with_residual(codec().option, dtype, source.data(),
                                    {has_in ? residual.data() : nullptr, left.data(), residual_dtype}, numel,
                                    bytes.data(), kRng, &num_nonfinite, kCpu);

  const size_t residual_skew = skew_of(residual_dtype, skew);
  GuardedArray device_source(source.size(), skew_of(dtype, skew)), device_bytes(wire_bytes, skew);
  GuardedArray device_in(residual.size(), residual_skew), device_out(residual.size(), residual_skew);
  device_source.assign(source.data());
  device_in.assign(residual.data());
  const GuardedArray& renewed = in_place ? device_in : device_out;
  const Residual device_residual{has_in ? device_in.data() : nullptr, renewed.data(), residual_dtype};
  expect_one_launch(numel, [&] {
    codec().device.encode_with_residual(codec().option, dtype, device_source.data(), device_residual, numel,
                                        device_bytes.data(), kRng, &device_num_nonfinite, kCudaStream);
  });
  EXPECT_EQ(device_num_nonfinite, num_nonfinite);
  ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kU8, device_bytes, bytes, false, "a byte of the message"));
  expect_bits(residual_dtype, renewed, left, true, "a residual");
}

TEST_P(CudaCodecs, EncodeWithResidualIsTheCpus) {
  size_t turn = 0;
  for (DType dtype : kEncodable) {
    for (size_t numel : kSizes) {
      for (int kind : {0, 1, 2, 4, 5, 6, 8}) {
        const DType residual_dtype = turn % 2 ? DType::kF32 : DType::kBF16;
        const bool in_place = turn / 2 % 2, has_in = turn % 11 != 0;
        SCOPED_TRACE(codec().name + " " + std::string(dtype_name(dtype)) + " " + std::to_string(numel) + " kind " +
                     std::to_string(kind) + ", turn " + std::to_string(turn));
        expect_encode_with_residual(dtype, values_of_kind(kind, dtype, numel, turn), residual_dtype, in_place, has_in,
                                    turn % 5);
        if (HasFailure()) return;
        ++turn;
      }
    }
  }
}

// `residual_like` says whether there is one, with an `in`, and of which type.
void CudaCodecs::expect_reduce_encode(DType sent, int count, double factor, size_t numel, int kind,
                                      const Residual& residual_like, bool in_place, size_t skew) const {
  const size_t wire_bytes = codec().wire_bytes(numel), stride = wire_bytes + skew;
  std::vector<uint8_t> codes(stride * static_cast<size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    const int rank_kind = rank == count / 2 ? kind : 0;  // one of them is odd
    const std::vector<uint8_t> source =
        stored(sent, values_of_kind(rank_kind, sent, numel, 90 + static_cast<uint64_t>(rank)));
    codec().host.encode(codec().option, sent, source.data(), numel, codes.data() + stride * static_cast<size_t>(rank),
                        {static_cast<uint64_t>(rank), 0}, nullptr, kCpu);
  }
  const DType residual_dtype = residual_like.dtype;
  const std::vector<uint8_t> residual = stored(residual_dtype, testing::random_values(residual_dtype, numel, 6));
  std::vector<uint8_t> bytes(wire_bytes), left(residual.size());
  uint64_t num_nonfinite = 0, device_num_nonfinite = 0;
  Residual host_residual{residual_like.in == nullptr ? nullptr : residual.data(), left.data(), residual_dtype};
  if (!residual_like.is_on()) host_residual = {};
  codec().host.reduce_encode(codec().option, {codes.data(), stride, count}, factor, host_residual, numel, bytes.data(),
                             kRng, &num_nonfinite, kCpu);

  const size_t residual_skew = skew_of(residual_dtype, skew);
  GuardedArray device_codes(codes.size(), skew), device_bytes(wire_bytes, skew);
  GuardedArray device_in(residual.size(), residual_skew), device_out(residual.size(), residual_skew);
  device_codes.assign(codes.data());
  device_in.assign(residual.data());
  const GuardedArray& renewed = in_place ? device_in : device_out;
  Residual device_residual{residual_like.in == nullptr ? nullptr : device_in.data(), renewed.data(), residual_dtype};
  if (!residual_like.is_on()) device_residual = {};
  expect_one_launch(numel, [&] {
    codec().device.reduce_encode(codec().option, {device_codes.data(), stride, count}, factor, device_residual, numel,
                                 device_bytes.data(), kRng, &device_num_nonfinite, kCudaStream);
  });
  EXPECT_EQ(device_num_nonfinite, num_nonfinite);
  ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kU8, device_bytes, bytes, false, "a byte of the message"));
  if (residual_like.is_on()) expect_bits(residual_dtype, renewed, left, true, "a residual");
}

TEST_P(CudaCodecs, ReduceEncodeIsTheCpus) {
  int something = 0;
  const Residual kinds[] = {{},
                            {&something, &something, DType::kF32},
                            {&something, &something, DType::kBF16},
                            {nullptr, &something, DType::kF32}};
  size_t turn = 0;
  for (size_t numel : kSizes) {
    for (int count = 1; count <= 9; ++count, ++turn) {
      const double factor = turn % 3 ? 1.0 / count : 1.0;
      SCOPED_TRACE(codec().name + " " + std::to_string(numel) + " of " + std::to_string(count) + ", turn " +
                   std::to_string(turn));
      expect_reduce_encode(kEncodable[turn % 3], count, factor, numel, static_cast<int>(turn) % testing::kNumKinds,
                           kinds[turn % 4], turn % 8 < 4, turn % 5);
      if (HasFailure()) return;
    }
  }
  // More than there are decoders at a time.
  expect_reduce_encode(DType::kF32, 70, 1.0 / 70, 2048 + 9, 0, kinds[1], true, 0);
}

// Headers as they may stand in a message: all pairs of what is special, and many at random, of which some clamp both
// the lowest and the highest code. Of qsgd the first of the two is the norm.
std::vector<std::pair<float, float>> headers() {
  const float special[] = {0.0f,     0x1p-149f, 0x1p-126f,  0x1p-101f, 0x1p-99f, 1.0f,     1.0f + 0x1p-23f,
                           3.0f,     0x1p103f,  0x1.fp111f, 0x1p112f,  0x1p113f, 0x1p126f, 0x1.fffffep127f,
                           INFINITY, NAN};
  std::vector<float> bounds;
  for (float bound : special) bounds.insert(bounds.end(), {bound, -bound});
  std::vector<std::pair<float, float>> all;
  for (float low : bounds) {
    for (float high : bounds) {
      if (!(low > high)) all.emplace_back(low, high);
    }
  }
  const std::vector<float> drawn = testing::random_values(DType::kF32, 600, 77);
  for (size_t i = 0; i + 2 < drawn.size(); i += 3) {
    const float third = std::ldexp(drawn[i + 2], -20 * static_cast<int>(i % 4));  // and ranges of a few units only
    all.emplace_back(std::minmax(drawn[i], drawn[i + 1]));
    all.emplace_back(std::minmax(drawn[i], drawn[i] + third));
  }
  return all;
}

TEST_P(CudaCodecs, EveryCodeUnderAnyHeaderIsDecodedAsByTheCpu) {
  const size_t numel = 2048, wire_bytes = codec().wire_bytes(numel);
  if (codec().name.starts_with("topk")) GTEST_SKIP() << "its blocks have no header";
  GuardedArray device_bytes(wire_bytes), device_decoded(numel * 4), device_sums(numel * 4);
  for (const auto& [low, high] : headers()) {
    SCOPED_TRACE(codec().name + " " + std::to_string(low) + " " + std::to_string(high));
    std::vector<uint8_t> bytes(wire_bytes), decoded(numel * 4);
    for (size_t i = 0; i < wire_bytes; ++i) bytes[i] = static_cast<uint8_t>(i * 5);  // all of them, in another order
    const float header[] = {low, high};
    std::memcpy(bytes.data(), header, codec().name == "minmax_uint8" || codec().name == "centroid" ? 8 : 4);
    std::vector<float> sums(numel, 0.0f);
    codec().host.decode(codec().option, DType::kF32, bytes.data(), numel, decoded.data(), kCpu);
    codec().host.decode_add(codec().option, bytes.data(), numel, sums.data(), kCpu);
    device_bytes.assign(bytes.data());
    for (size_t i = 0; i < numel; ++i) device_sums.as<float>()[i] = 0.0f;
    codec().device.decode(codec().option, DType::kF32, device_bytes.data(), numel, device_decoded.data(), kCudaStream);
    codec().device.decode_add(codec().option, device_bytes.data(), numel, device_sums.as<float>(), kCudaStream);
    ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_decoded, decoded, false, "what is decoded"));
    ASSERT_NO_FATAL_FAILURE(expect_bits(DType::kF32, device_sums, stored(DType::kF32, sums), true, "a sum"));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CudaCodecs, ::testing::Range(size_t{0}, size_t{24}), [](const auto& info) {
  std::string name = cases()[info.param].name;
  for (char& letter : name) {
    if (letter == ':' || letter == '=' || letter == ',') letter = '_';
  }
  return name;
});

TEST(CudaCodecsTable, NamesAllCases) { EXPECT_EQ(cases().size(), 24u); }

}  // namespace
}  // namespace bagua

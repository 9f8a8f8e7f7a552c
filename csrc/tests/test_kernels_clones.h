// The CPU kernels compiled once more for one pinned instruction set, compared bit for bit with the ones
// that the loader chose. Each test_kernels_clone_*.cc defines BAGUA_MULTIVERSION, gives the namespace
// cpu another name, and includes this file: so every clone runs on one machine, and an FMA in one of them
// (a missing -ffp-contract=off) or a form that rounds differently is found.
#pragma once

#if !defined(BAGUA_MULTIVERSION) || !defined(cpu) || !defined(BAGUA_CLONE)
#error "define BAGUA_MULTIVERSION, cpu and BAGUA_CLONE first"
#endif

#include "csrc/kernels/cast.h"
#include "csrc/kernels/cpu/adam.cc"
#include "csrc/kernels/cpu/cast.cc"
#include "csrc/kernels/cpu/centroid.cc"
#include "csrc/kernels/cpu/copy_to_cold.cc"
#include "csrc/kernels/cpu/digest.cc"
#include "csrc/kernels/cpu/half.cc"
#include "csrc/kernels/cpu/half_codec.cc"
#include "csrc/kernels/cpu/minifloat.cc"
#include "csrc/kernels/cpu/minmax_uint8.cc"
#include "csrc/kernels/cpu/nonfinite.cc"
#include "csrc/kernels/cpu/onebit.cc"
#include "csrc/kernels/cpu/qsgd.cc"
#include "csrc/kernels/cpu/reduce.cc"
#include "csrc/kernels/cpu/subtract.cc"
#include "csrc/kernels/cpu/topk.cc"
#include "csrc/kernels/cpu/topk_chunk.cc"
#include "csrc/kernels/cpu/weighted_sum.cc"
#include "csrc/tests/test_kernels_oracle.h"

namespace bagua::testing {

// Static, because each file that includes this one has another BAGUA_CLONE.
static bool machine_runs_clone() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return std::string(BAGUA_CLONE) == "baseline" ||
         (std::string(BAGUA_CLONE) == "v3" ? __builtin_cpu_supports("x86-64-v3") : __builtin_cpu_supports("x86-64-v4"));
#else
  return std::string(BAGUA_CLONE) == "baseline";
#endif
}

#define BAGUA_SKIP_IF_CLONE_CANNOT_RUN() \
  if (!machine_runs_clone()) GTEST_SKIP() << "this CPU has no " BAGUA_CLONE

constexpr size_t kCloneNumel = 3 * 2048 + 33;  // full blocks and a tail that no vector fits

// Any bit pattern but NaN, whose payload after an addition may be either operand's.
inline void fill_bits(DType dtype, uint8_t* data, size_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < numel; ++i) {
    do store_integer(dtype, data, i, static_cast<int64_t>(random() & (dtype == DType::kBool ? 1 : ~uint64_t{0})));
    while (is_floating(dtype) && std::isnan(load_real(dtype, data, i)));
  }
}

// Results may be NaN (Inf - Inf): then both are.
inline void expect_same(DType dtype, Array& got, Array& expected, const std::string& what) {
  const size_t numel = got.size_bytes() / item_bytes(dtype);
  for (size_t i = 0; i < numel; ++i) {
    const size_t at = i * item_bytes(dtype);
    if (is_floating(dtype) && std::isnan(load_real(dtype, got.data(), i)) &&
        std::isnan(load_real(dtype, expected.data(), i))) {
      continue;
    }
    ASSERT_TRUE(same_bits(got.data() + at, expected.data() + at, item_bytes(dtype))) << what << " at " << i;
  }
}

// With one instruction set pinned it is the body for the baseline, whatever the machine.
TEST(BAGUA_CLONE_SUITE, CopyToCold) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  const size_t num_bytes = (size_t{64} << 10) + 100;  // streamed, with a head and a tail that are not
  Array source(num_bytes, 1), got(num_bytes, 3);
  fill_bits(DType::kU8, source.data(), num_bytes, 1);
  kernels::cpu::copy_to_cold(got.data(), source.data(), num_bytes);
  EXPECT_TRUE(same_bits(got.data(), source.data(), num_bytes));
}

TEST(BAGUA_CLONE_SUITE, Reduce) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const DType dtype = static_cast<DType>(t);
      const ReduceOp op = static_cast<ReduceOp>(o);
      if (!is_defined(op, dtype)) continue;
      const size_t num_bytes = kCloneNumel * item_bytes(dtype);
      Array a(num_bytes, 0), b(num_bytes, 0), c(num_bytes, 0), got(num_bytes, 0), expected(num_bytes, 0);
      fill_bits(dtype, a.data(), kCloneNumel, 1);
      fill_bits(dtype, b.data(), kCloneNumel, 2);
      fill_bits(dtype, c.data(), kCloneNumel, 3);
      const void* sources[] = {a.data(), b.data(), c.data()};
      void* out[] = {got.data()};
      void* reference[] = {expected.data()};
      for (int num_sources : {2, 3}) {
        kernels::cpu::reduce_many(op, dtype, sources, num_sources, out, 1, kCloneNumel);
        kernels::reduce_many(op, dtype, sources, num_sources, reference, 1, kCloneNumel, Stream{});
        expect_same(dtype, got, expected, std::string(reduce_op_name(op)) + " " + std::string(dtype_name(dtype)));
      }
      if (!is_floating(dtype)) continue;
      kernels::cpu::scale(dtype, got.data(), 0.7, kCloneNumel);
      kernels::scale(dtype, expected.data(), 0.7, kCloneNumel, Stream{});
      expect_same(dtype, got, expected, "scale " + std::string(dtype_name(dtype)));
    }
  }
}

TEST(BAGUA_CLONE_SUITE, WeightedSum) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
    const size_t num_bytes = kCloneNumel * item_bytes(dtype);
    Array a(num_bytes, 0), b(num_bytes, 0), c(num_bytes, 0), got(num_bytes, 0), expected(num_bytes, 0);
    fill_bits(dtype, a.data(), kCloneNumel, 1);
    fill_bits(dtype, b.data(), kCloneNumel, 2);
    fill_bits(dtype, c.data(), kCloneNumel, 3);
    const void* sources[] = {a.data(), b.data(), c.data()};
    const double weights[] = {1.0 / 3, 0.25, 0.7};
    kernels::cpu::weighted_sum(dtype, sources, weights, 3, got.data(), kCloneNumel);
    kernels::weighted_sum(dtype, sources, weights, 3, expected.data(), kCloneNumel, Stream{});
    expect_same(dtype, got, expected, "weighted_sum " + std::string(dtype_name(dtype)));
  }
}

TEST(BAGUA_CLONE_SUITE, Adam) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
    for (bool is_frozen : {false, true}) {
      const size_t num_bytes = kCloneNumel * item_bytes(dtype);
      std::vector<std::unique_ptr<Array>> arrays;
      for (uint64_t i = 0; i < 8; ++i) {  // got and expected: x, g, m, v
        arrays.push_back(std::make_unique<Array>(num_bytes, 0));
        fill_random(dtype, arrays[i]->data(), kCloneNumel, i % 4);
      }
      const auto tensor = [&](size_t first) {
        return kernels::AdamTensor{arrays[first]->data(),
                                   arrays[first + 1]->data(),
                                   arrays[first + 2]->data(),
                                   arrays[first + 3]->data(),
                                   kCloneNumel,
                                   -0.003,
                                   0.3};
      };
      const kernels::AdamTensor got = tensor(0), expected = tensor(4);
      const kernels::AdamOptions options{0.9, 0.999, 1e-8, 0.01, is_frozen};
      kernels::cpu::adam(dtype, &got, 1, options);
      kernels::adam(dtype, &expected, 1, options, Stream{});
      for (size_t i = 0; i < 4; ++i) {
        expect_same(dtype, *arrays[i], *arrays[i + 4], "adam " + std::string(dtype_name(dtype)));
      }
    }
  }
}

TEST(BAGUA_CLONE_SUITE, Subtract) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  Array source(kCloneNumel * 4, 0), got(kCloneNumel * 4, 0), expected(kCloneNumel * 4, 0);
  fill_bits(DType::kF32, source.data(), kCloneNumel, 1);
  fill_bits(DType::kF32, got.data(), kCloneNumel, 2);
  expected.assign(got);
  kernels::cpu::subtract(got.as<float>(), source.as<float>(), kCloneNumel);
  kernels::subtract(expected.as<float>(), source.as<float>(), kCloneNumel, Stream{});
  expect_same(DType::kF32, got, expected, "subtract");
}

TEST(BAGUA_CLONE_SUITE, Digest) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  Array bytes(kCloneNumel, 1);
  fill_bits(DType::kU8, bytes.data(), kCloneNumel, 1);
  const kernels::DigestPiece piece{bytes.data(), kCloneNumel};
  uint64_t expected = 0;
  kernels::digest(&piece, 1, &expected, Stream{});
  EXPECT_EQ(kernels::cpu::digest(bytes.data(), kCloneNumel), expected);
}

TEST(BAGUA_CLONE_SUITE, CountNonfinite) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16}) {
    Array values(kCloneNumel * item_bytes(dtype), 0);
    fill_bits(dtype, values.data(), kCloneNumel, 1);
    for (size_t stride : {1, 33}) {
      EXPECT_EQ(kernels::cpu::count_nonfinite(dtype, values.data(), kCloneNumel, stride),
                kernels::count_nonfinite(dtype, values.data(), kCloneNumel, stride));
    }
  }
}

TEST(BAGUA_CLONE_SUITE, Cast) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      const DType source_type = static_cast<DType>(from), type = static_cast<DType>(to);
      Array source(65536 * item_bytes(source_type), 0);
      Array got(65536 * item_bytes(type), 0), expected(65536 * item_bytes(type), 0);
      std::mt19937_64 random(4);
      for (size_t i = 0; i < 65536; ++i) {
        store_integer(source_type, source.data(), i, static_cast<int64_t>(item_bytes(source_type) == 2 ? i : random()));
      }
      kernels::cpu::cast(source_type, source.data(), type, got.data(), 65536);
      kernels::cast(source_type, source.data(), type, expected.data(), 65536, Stream{});
      EXPECT_TRUE(same_bits(got.data(), expected.data(), got.size_bytes())) << from << " to " << to;
      if (source_type == DType::kF64 || item_bytes(type) != 2) continue;
      uint64_t num_nonfinite = 0, expected_num_nonfinite = 0;
      const int wire = static_cast<int>(type);
      kernels::cpu::kHalf.encode(wire, source_type, source.data(), 65536, got.data(), {}, &num_nonfinite, Stream{});
      kernels::kHalf.encode(wire, source_type, source.data(), 65536, expected.data(), {}, &expected_num_nonfinite,
                            Stream{});
      EXPECT_TRUE(same_bits(got.data(), expected.data(), got.size_bytes())) << from << " encoded to " << to;
      EXPECT_EQ(num_nonfinite, expected_num_nonfinite);
    }
  }
}

TEST(BAGUA_CLONE_SUITE, MinmaxUint8) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  constexpr size_t kNumBytes = kernels::minmax_uint8_wire_bytes(kCloneNumel);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Array source(kCloneNumel * 4, 0), got(kNumBytes, 1), expected(kNumBytes, 0);
    fill_random(DType::kF32, source.data(), kCloneNumel, seed);
    if (seed % 3 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
    if (seed % 3 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
    kernels::cpu::kMinmaxUint8.encode(0, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr, Stream{});
    kernels::kMinmaxUint8.encode(0, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr, Stream{});
    ASSERT_TRUE(same_bits(got.data(), expected.data(), kNumBytes)) << "seed " << seed;
    Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
    sum.assign(source);
    expected_sum.assign(source);
    kernels::cpu::kMinmaxUint8.decode_add(0, got.data(), kCloneNumel, sum.as<float>(), Stream{});
    kernels::kMinmaxUint8.decode_add(0, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
    ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << "seed " << seed;
  }
}

TEST(BAGUA_CLONE_SUITE, Minifloat) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int type = 0; type < kernels::kNumMinifloats; ++type) {
    const size_t num_bytes = kernels::minifloat_wire_bytes(kCloneNumel, type);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Array source(kCloneNumel * 4, 0), got(num_bytes, 1), expected(num_bytes, 0);
      fill_random(DType::kF32, source.data(), kCloneNumel, seed);
      if (seed % 3 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
      if (seed % 3 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
      kernels::cpu::kMinifloat.encode(type, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr, Stream{});
      kernels::kMinifloat.encode(type, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr, Stream{});
      ASSERT_TRUE(same_bits(got.data(), expected.data(), num_bytes)) << "type " << type << ", seed " << seed;
      Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
      sum.assign(source);
      expected_sum.assign(source);
      kernels::cpu::kMinifloat.decode_add(type, got.data(), kCloneNumel, sum.as<float>(), Stream{});
      kernels::kMinifloat.decode_add(type, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
      ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << "type " << type << ", seed " << seed;
    }
  }
}

TEST(BAGUA_CLONE_SUITE, Qsgd) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int bits : {8, 4, 2}) {
    const size_t num_bytes = kernels::qsgd_wire_bytes(kCloneNumel, bits);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Array source(kCloneNumel * 4, 0), got(num_bytes, 1), expected(num_bytes, 0);
      fill_random(DType::kF32, source.data(), kCloneNumel, seed);
      if (seed % 3 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
      if (seed % 3 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
      const CounterRng rng{seed, 2048 * seed};
      {
        const auto mode = seed % 2 == 0 ? std::make_unique<FlushToZero>() : nullptr;  // which changes nothing
        kernels::cpu::kQsgd.encode(bits, DType::kF32, source.data(), kCloneNumel, got.data(), rng, nullptr, Stream{});
      }
      kernels::kQsgd.encode(bits, DType::kF32, source.data(), kCloneNumel, expected.data(), rng, nullptr, Stream{});
      ASSERT_TRUE(same_bits(got.data(), expected.data(), num_bytes)) << bits << " bits, seed " << seed;
      Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
      sum.assign(source);
      expected_sum.assign(source);
      kernels::cpu::kQsgd.decode_add(bits, got.data(), kCloneNumel, sum.as<float>(), Stream{});
      kernels::kQsgd.decode_add(bits, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
      ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << bits << " bits, seed " << seed;
    }
  }
}

TEST(BAGUA_CLONE_SUITE, Centroid) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  constexpr size_t kNumBytes = kernels::centroid_wire_bytes(kCloneNumel);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Array source(kCloneNumel * 4, 0), got(kNumBytes, 1), expected(kNumBytes, 0);
    fill_random(DType::kF32, source.data(), kCloneNumel, seed);
    if (seed % 3 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
    if (seed % 3 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
    kernels::cpu::kCentroid.encode(0, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr, Stream{});
    kernels::kCentroid.encode(0, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr, Stream{});
    ASSERT_TRUE(same_bits(got.data(), expected.data(), kNumBytes)) << "seed " << seed;
    Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
    sum.assign(source);
    expected_sum.assign(source);
    kernels::cpu::kCentroid.decode_add(0, got.data(), kCloneNumel, sum.as<float>(), Stream{});
    kernels::kCentroid.decode_add(0, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
    ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << "seed " << seed;
  }
}

TEST(BAGUA_CLONE_SUITE, Onebit) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  constexpr size_t kNumBytes = kernels::onebit_wire_bytes(kCloneNumel);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Array source(kCloneNumel * 4, 0), got(kNumBytes, 1), expected(kNumBytes, 0);
    fill_random(DType::kF32, source.data(), kCloneNumel, seed);
    if (seed % 3 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
    if (seed % 3 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
    kernels::cpu::kOnebit.encode(0, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr, Stream{});
    kernels::kOnebit.encode(0, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr, Stream{});
    ASSERT_TRUE(same_bits(got.data(), expected.data(), kNumBytes)) << "seed " << seed;
    Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
    sum.assign(source);
    expected_sum.assign(source);
    kernels::cpu::kOnebit.decode_add(0, got.data(), kCloneNumel, sum.as<float>(), Stream{});
    kernels::kOnebit.decode_add(0, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
    ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << "seed " << seed;
  }
}

TEST(BAGUA_CLONE_SUITE, Topk) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int k : {8, 32, 256}) {
    const size_t num_bytes = kernels::topk_wire_bytes(kCloneNumel, k);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Array source(kCloneNumel * 4, 0), got(num_bytes, 1), expected(num_bytes, 0);
      fill_random(DType::kF32, source.data(), kCloneNumel, seed);
      // Subnormal, huge, and with many ties.
      if (seed % 4 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
      if (seed % 4 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
      for (size_t i = 0; seed % 4 == 3 && i < kCloneNumel; ++i)
        source.as<float>()[i] = std::rint(source.as<float>()[i]);
      kernels::cpu::kTopk.encode(k, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr, Stream{});
      kernels::kTopk.encode(k, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr, Stream{});
      ASSERT_TRUE(same_bits(got.data(), expected.data(), num_bytes)) << "k " << k << ", seed " << seed;
    }
  }
}

TEST(BAGUA_CLONE_SUITE, TopkChunk) {
  BAGUA_SKIP_IF_CLONE_CANNOT_RUN();
  for (int option : {kernels::TopkChunk{8, false}.option(), kernels::TopkChunk{64, true}.option(),
                     kernels::TopkChunk{64, true, true}.option()}) {
    const size_t num_bytes = kernels::topk_chunk_wire_bytes(kCloneNumel, option);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Array source(kCloneNumel * 4, 0), got(num_bytes, 1), expected(num_bytes, 0);
      fill_random(DType::kF32, source.data(), kCloneNumel, seed);
      // Subnormal, huge, and with many ties.
      if (seed % 4 == 1) kernels::scale(DType::kF32, source.data(), 1e-41, kCloneNumel, Stream{});
      if (seed % 4 == 2) kernels::scale(DType::kF32, source.data(), 1e36, kCloneNumel, Stream{});
      for (size_t i = 0; seed % 4 == 3 && i < kCloneNumel; ++i)
        source.as<float>()[i] = std::rint(source.as<float>()[i]);
      kernels::cpu::kTopkChunk.encode(option, DType::kF32, source.data(), kCloneNumel, got.data(), {}, nullptr,
                                      Stream{});
      kernels::kTopkChunk.encode(option, DType::kF32, source.data(), kCloneNumel, expected.data(), {}, nullptr,
                                 Stream{});
      ASSERT_TRUE(same_bits(got.data(), expected.data(), num_bytes)) << "option " << option << ", seed " << seed;
      Array sum(kCloneNumel * 4, 0), expected_sum(kCloneNumel * 4, 0);
      kernels::cpu::kTopkChunk.decode_add(option, got.data(), kCloneNumel, sum.as<float>(), Stream{});
      kernels::kTopkChunk.decode_add(option, expected.data(), kCloneNumel, expected_sum.as<float>(), Stream{});
      ASSERT_TRUE(same_bits(sum.data(), expected_sum.data(), sum.size_bytes())) << "option " << option;
    }
  }
}

}  // namespace bagua::testing

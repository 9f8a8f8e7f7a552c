// Adam's step against a plain loop in which every operation rounds to the type that is computed in: type x numel x
// misalignment, before and after the second moment is frozen, decay, both forms of the mean, NaN, and the errors.
#include "csrc/kernels/adam.h"

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using kernels::AdamOptions;
using kernels::AdamTensor;
using testing::Array;
using testing::fill_random;
using testing::kFloats;
using testing::kSmallSizes;
using testing::load_real;
using testing::same_bits;
using testing::store_real;

struct Element {
  double x, g, m, v;
};

// In f64, where each operation of f32 is exact enough to be rounded once more.
Element define(DType dtype, Element e, const AdamTensor& tensor, const AdamOptions& options) {
  const auto r = [=](double value) {
    return dtype == DType::kF64 ? value : static_cast<double>(static_cast<float>(value));
  };
  const double rest1 = r(1 - options.beta1), beta2 = r(options.beta2), rest2 = r(1 - options.beta2);
  const double step_size = r(tensor.step_size), correction = r(tensor.correction);
  double g = e.g;
  if (options.weight_decay != 0) g = r(g + r(r(options.weight_decay) * e.x));
  const double distance = r(g - e.m);
  e.m = rest1 < 0.5 ? r(e.m + r(rest1 * distance)) : r(g - r(distance * r(1 - rest1)));
  if (options.is_frozen) {
    if (!(e.v > 0)) e.m *= 0;
  } else {
    e.v = r(r(e.v * beta2) + r(r(rest2 * g) * g));
  }
  e.x = r(e.x + r(r(step_size * e.m) / r(r(r(std::sqrt(e.v)) / correction) + r(options.eps))));
  return e;
}

void check(DType dtype, size_t numel, size_t offset_bytes, const AdamOptions& options) {
  const size_t item = item_bytes(dtype);
  constexpr int kNumTensors = 2;
  std::vector<std::unique_ptr<Array>> arrays, expected;
  std::vector<AdamTensor> tensors;
  for (size_t t = 0; t < kNumTensors; ++t) {
    for (size_t a = 0; a < 4; ++a) {
      arrays.push_back(std::make_unique<Array>(numel * item, offset_bytes));
      fill_random(dtype, arrays.back()->data(), numel, 7 * a + t + numel);
      expected.push_back(std::make_unique<Array>(numel * item, offset_bytes));
    }
    uint8_t* const v = arrays.back()->data();
    for (size_t i = 0; i < numel; ++i) store_real(dtype, v, i, i % 5 == 0 ? 0 : std::fabs(load_real(dtype, v, i)));
    if (numel > 3) store_real(dtype, arrays[4 * t + 1]->data(), 3, NAN);
    tensors.push_back({arrays[4 * t]->data(), arrays[4 * t + 1]->data(), arrays[4 * t + 2]->data(), v, numel,
                       -0.01 * static_cast<double>(t + 1), 0.3});
    for (size_t i = 0; i < numel; ++i) {
      const auto at = [&](size_t a) { return load_real(dtype, arrays[4 * t + a]->data(), i); };
      const Element e = define(dtype, {at(0), at(1), at(2), at(3)}, tensors[t], options);
      const double values[] = {e.x, e.g, e.m, e.v};
      for (size_t a = 0; a < 4; ++a) store_real(dtype, expected[4 * t + a]->data(), i, values[a]);
    }
  }
  kernels::adam(dtype, tensors.data(), kNumTensors, options, Stream{});
  for (size_t a = 0; a < arrays.size(); ++a) {
    arrays[a]->expect_canary();
    for (size_t i = 0; i < numel; ++i) {
      if (same_bits(arrays[a]->data() + i * item, expected[a]->data() + i * item, item)) continue;
      const double got = load_real(dtype, arrays[a]->data(), i), wanted = load_real(dtype, expected[a]->data(), i);
      ASSERT_TRUE((std::isnan(got) && std::isnan(wanted)) || (got == 0 && wanted == 0))
          << dtype_name(dtype) << " x" << numel << ", array " << a << " at " << i << ": " << got << ", not " << wanted;
    }
  }
}

TEST(Adam, EqualsTheDefinition) {
  for (DType dtype : kFloats) {
    for (size_t numel : kSmallSizes) {
      for (size_t offset : {size_t{0}, item_bytes(dtype)}) {
        for (bool is_frozen : {false, true}) {
          check(dtype, numel, offset, {0.9, 0.999, 1e-8, 0, is_frozen});
          check(dtype, numel, offset, {0.9, 0.99, 1e-3, 0.1, is_frozen});
          check(dtype, numel, offset, {0.5, 0.9, 1e-8, 0.1, is_frozen});
          check(dtype, numel, offset, {0, 0, 1e-8, 0, is_frozen});
        }
      }
    }
  }
}

TEST(Adam, RefusesIntegers) {
  testing::expect_invalid_argument(
      [] {
        kernels::adam(DType::kI32, nullptr, 0, {0.9, 0.999, 1e-8, 0, false}, Stream{});
      },
      "adam: dtype is int32, expected one of");
}

}  // namespace
}  // namespace bagua

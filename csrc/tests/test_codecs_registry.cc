// The table of codecs: names, options, and the numbers by which ranks compare codecs and messages show them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "csrc/codecs/codec.h"
#include "csrc/tests/test_kernels_oracle.h"
#include "csrc/transport/transport.h"

namespace bagua {
namespace {

using testing::expect_invalid_argument;

TEST(Registry, KnowsItsCodecsByName) {
  const std::vector<std::string> names = registered_codecs();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  for (const char* name : {"bf16", "fp16", "minmax_uint8"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1);
    EXPECT_EQ(get_codec(name).name(), name);
    EXPECT_EQ(&get_codec(name), &get_codec(name));
  }
  expect_invalid_argument([] { get_codec("fp8"); }, "unknown codec \"fp8\"");
  expect_invalid_argument([] { get_codec("fp8"); }, "the registered codecs are: bf16, ");
}

TEST(Registry, Options) {
  EXPECT_EQ(get_codec("qsgd:bits=4").wire_bytes(2048, DType::kF32), 1028u);
  EXPECT_EQ(&get_codec("qsgd:bits=4"), &get_codec("qsgd:bits=4"));
  const struct {
    const char* spec;
    const char* message;
  } cases[] = {{"qsgd:bits=3", "codec \"qsgd\": bits is 3, expected one of 8, 4, 2"},
               {"qsgd:bits=4:bits=2", "bits is 4:bits=2, expected"},
               {"qsgd:bits=4,bits=2", "has the option \"bits\" twice; give it once"},
               {"qsgd:bits=4,bits=4", "has the option \"bits\" twice; give it once"},
               {"qsgd:depth=4", "has no option \"depth\"; its options are: bits"},
               {"qsgd:bits=4,depth=4", "has no option \"depth\"; its options are: bits"},
               {"fp16:bits=4", "has no option \"bits\"; it has none"},
               {"topk:bits=2", "codec \"topk\": bits=2 needs chunk=4096; give that too"},
               {"topk:dct=1", "codec \"topk\": dct=1 needs chunk=4096; give that too"},
               {"qsgd:4", "has the option \"4\"; options are given as name:option=value,option=value"},
               {"qsgd:", "has the option \"\"; options are given as"},
               {"qsgd:bits=4,", "has the option \"\"; options are given as"},
               {"qsgd,bits=4", "unknown codec \"qsgd,bits=4\""}};
  for (const auto& one : cases) expect_invalid_argument([&] { get_codec(one.spec); }, one.message);
}

// The number that ranks compare, and the text that messages show.
TEST(Registry, NumbersStandForNamesWithOptions) {
  std::vector<int> seen(256);
  for (const std::string& name : registered_codecs()) {
    EXPECT_EQ(codec_spec(codec_number(get_codec(name))), name);
    ++seen[codec_number(get_codec(name))];
  }
  for (const char* spec : {"qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=16", "topk:k=256", "topk:chunk=4096",
                           "topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,k=256,bits=2", "topk:chunk=4096,k=8,dct=1",
                           "topk:chunk=4096,k=256,bits=2,dct=1"}) {
    EXPECT_EQ(codec_spec(codec_number(get_codec(spec))), spec);
    ++seen[codec_number(get_codec(spec))];
  }
  EXPECT_EQ(codec_number(get_codec("qsgd:bits=8")), codec_number(get_codec("qsgd")));
  EXPECT_EQ(*std::max_element(seen.begin(), seen.end()), 1);
  EXPECT_EQ(seen[0], 0);
  for (int number : {0, 255}) EXPECT_EQ(codec_spec(static_cast<uint8_t>(number)), "");
  EXPECT_EQ(codec_spec(1), "bf16");
  Operation operation;
  operation.kind = OperationKind::kAllReduce;
  operation.codec = codec_number(get_codec("topk:k=16"));
  EXPECT_EQ(describe(operation), "all_reduce of 0 uint8 (SUM) with codec " + std::to_string(operation.codec));
  name_codecs_by(&codec_spec);
  EXPECT_EQ(describe(operation), "all_reduce of 0 uint8 (SUM) with codec topk:k=16");
  operation.codec = 255;
  EXPECT_EQ(describe(operation), "all_reduce of 0 uint8 (SUM) with codec 255");
  name_codecs_by(nullptr);
}

// Codes nothing.
class OddCodec final : public Codec {
 public:
  OddCodec(std::string name, int variant) : name_(std::move(name)), variant_(variant) {}
  std::string_view name() const override { return name_; }
  int variant() const override { return variant_; }
  size_t block_numel() const override { return 1; }
  size_t wire_bytes(size_t, DType) const override { return 0; }
  size_t encode(const void*, DType, size_t, uint8_t*, CounterRng, Stream) const override { return 0; }
  void decode(const uint8_t*, DType, size_t, void*, Stream) const override {}
  void decode_add(const uint8_t*, DType, size_t, float*, Stream) const override {}
  size_t encode_with_residual(const void*, DType, const kernels::Residual&, size_t, uint8_t*, CounterRng,
                              Stream) const override {
    return 0;
  }
  size_t reduce_encode(const kernels::Contributions&, DType, double, const kernels::Residual&, size_t, uint8_t*,
                       CounterRng, Stream) const override {
    return 0;
  }

 private:
  const std::string name_;
  const int variant_;
};

template <typename Body>
void expect_bug(Body body, const std::string& part_of_message) {
  try {
    body();
    FAIL() << "expected an Error that mentions " << part_of_message;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInternal);
    EXPECT_NE(std::string(error.what()).find(part_of_message), std::string::npos) << error.what();
  }
}

TEST(Registry, VariantsAreInRangeAndDiffer) {
  const auto add = [](int first, int second) {
    register_codec("odd", [=](CodecOptions& options) {
      return std::make_unique<OddCodec>("odd", options.one_of("x", {1, 2}) == 1 ? first : second);
    });
  };
  expect_bug([&] { add(0, 2); }, "has variant 2 as odd:x=2, expected 0 to 1");
  expect_bug([&] { add(-1, 0); }, "has variant -1 as odd, expected 0 to 1");
  expect_bug([&] { add(1, 1); }, "has variant 1 as odd and as odd:x=2, which ranks could not tell apart");
  expect_bug([&] { codec_number(OddCodec("odd", 0)); }, "\"odd\" of variant 0 is not registered");
  expect_bug([&] { codec_number(OddCodec("fp16", 1)); }, "\"fp16\" of variant 1 is not registered");
}

// In a program of its own, because nothing takes a codec out again.
TEST(RegistryDeathTest, MoreCodecsThanNumbers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        try {
          for (int i = 0; i < 255; ++i) {
            const std::string name = "z" + std::to_string(i);
            register_codec(name, [=](CodecOptions&) { return std::make_unique<OddCodec>(name, 0); });
            if (codec_spec(codec_number(OddCodec(name, 0))) != name) std::exit(2);
          }
        } catch (const Error& error) {
          std::fprintf(stderr, "%s\n", error.what());
          std::exit(error.kind() == ErrorKind::kInternal ? 0 : 1);
        }
        std::exit(3);
      },
      ::testing::ExitedWithCode(0),
      "makes the options of all codecs 256, more than the 255 that a number of a byte tells apart");
}

TEST(Registry, ANameRegisteredTwiceIsABug) {
  expect_bug([] { register_codec("fp16", [](CodecOptions&) { return std::unique_ptr<Codec>(); }); }, "\"fp16\"");
}

}  // namespace
}  // namespace bagua

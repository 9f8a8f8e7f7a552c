// The copy into cold memory: every byte, none beside them, for sizes on both sides of the threshold and all
// misalignments that matter.
#include "csrc/kernels/copy_to_cold.h"

#include "csrc/tests/test_kernels_oracle.h"

namespace bagua {
namespace {

using testing::Array;
using testing::fill_random;

TEST(CopyToCold, CopiesEveryByte) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{65535}, size_t{65536}, size_t{65537}, size_t{100'003},
                       size_t{1} << 20}) {
    for (size_t to : {0, 1, 4, 32, 63}) {
      for (size_t from : {0, 1, 4, 48}) {
        Array source(bytes, from), destination(bytes + to, 0);
        fill_random(DType::kU8, source.data(), bytes, bytes + to);
        std::memset(destination.data(), 7, bytes + to);
        kernels::copy_to_cold(destination.data() + to, source.data(), bytes, Stream{});
        EXPECT_TRUE(testing::same_bits(destination.data() + to, source.data(), bytes))
            << bytes << " " << to << " " << from;
        for (size_t i = 0; i < to; ++i) ASSERT_EQ(destination.data()[i], 7);
        destination.expect_canary();
      }
    }
  }
}

}  // namespace
}  // namespace bagua

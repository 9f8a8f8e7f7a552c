// Tests of the groups that a process remembers to have closed.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "csrc/communicator/closed_groups.h"

namespace bagua {
namespace {

const std::vector<uint8_t> kReport = {1, 2, 3};

TEST(ClosedGroups, KeepsTheLastOnes) {
  ClosedGroups closed(3);
  for (const char* key : {"a", "b", "c", "d"}) closed.add(key, std::nullopt);
  EXPECT_FALSE(closed.contains("a"));
  for (const char* key : {"b", "c", "d"}) EXPECT_TRUE(closed.contains(key)) << key;
  EXPECT_FALSE(closed.contains("e"));
}

TEST(ClosedGroups, KnowsHowTheyFailed) {
  ClosedGroups closed(2);
  closed.add("failed", kReport);
  closed.add("well", std::nullopt);
  EXPECT_EQ(closed.abort_of("failed"), kReport);
  EXPECT_EQ(closed.abort_of("well"), std::nullopt);
  closed.add("next", std::nullopt);
  EXPECT_FALSE(closed.contains("failed"));
  EXPECT_EQ(closed.abort_of("failed"), std::nullopt);
}

TEST(ClosedGroups, ForgetsOneThatIsOpenedAgain) {
  ClosedGroups closed(2);
  closed.add("a", kReport);
  closed.add("b", std::nullopt);
  closed.erase("a");
  EXPECT_FALSE(closed.contains("a"));
  EXPECT_EQ(closed.abort_of("a"), std::nullopt);
  closed.erase("never there");
  for (int i = 0; i < 5; ++i) {  // which leaves the others where they are
    closed.add("c", std::nullopt);
    closed.erase("c");
  }
  EXPECT_TRUE(closed.contains("b"));
  closed.add("a", std::nullopt);
  closed.add("a", kReport);  // what was told first stays
  EXPECT_TRUE(closed.contains("a"));
  EXPECT_TRUE(closed.contains("b"));
  EXPECT_EQ(closed.abort_of("a"), std::nullopt);
}

}  // namespace
}  // namespace bagua

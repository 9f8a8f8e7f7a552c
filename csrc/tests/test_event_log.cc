// The log of spans: rings that do not drive out each other's spans, one order over both, and what is told of losses.
#include <algorithm>

#include <gtest/gtest.h>

#include "csrc/collectives/collectives.h"
#include "csrc/common/event_log.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

// An operation of so many parts, from `*now_ns` on, each of 10 ns.
void add_operation(EventLog& log, uint64_t ticket, size_t num_parts, int64_t* now_ns) {
  const int64_t begin_ns = *now_ns;
  log.set_ticket(ticket);
  log.add(EventKind::kQueued, begin_ns - 5, begin_ns, 1);
  for (size_t part = 0; part < num_parts; ++part, *now_ns += 10) {
    log.add(part % 2 == 0 ? EventKind::kEncode : EventKind::kWire, *now_ns, *now_ns + 10, 1);
  }
  log.add(EventKind::kOperation, begin_ns, *now_ns, 1);
  *now_ns += 10;
}

std::vector<uint64_t> tickets(const std::vector<Event>& events, EventKind kind) {
  std::vector<uint64_t> found;
  for (const Event& event : events) {
    if (event.kind == kind) found.push_back(event.ticket);
  }
  return found;
}

TEST(EventLog, PartsDriveOutNoOperation) {
  constexpr uint64_t kOperations = 100;
  constexpr size_t kParts = 2 * EventLog::kPartSpans / kOperations;  // twice as many as the ring holds
  EventLog log;
  int64_t now_ns = 1000, begin_of_last_ns = 0;
  std::vector<uint64_t> expected;
  for (uint64_t ticket = 1; ticket <= kOperations; ++ticket) {
    begin_of_last_ns = now_ns;
    add_operation(log, ticket, kParts, &now_ns);
    expected.push_back(ticket);
  }
  const auto events = log.take(false);
  EXPECT_EQ(tickets(events, EventKind::kOperation), expected);
  EXPECT_EQ(tickets(events, EventKind::kQueued), expected);
  EXPECT_EQ(events.size(), 2 * kOperations + EventLog::kPartSpans);
  EXPECT_TRUE(
      std::is_sorted(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.end_ns < b.end_ns; }));

  const auto [operations_ns, parts_ns] = log.kept_since_ns();
  EXPECT_EQ(operations_ns, 0);
  EXPECT_LT(parts_ns, begin_of_last_ns);
  for (const Event& event : events) {
    if (event.kind != EventKind::kOperation || event.begin_ns <= parts_ns) continue;
    const auto num_kept = std::count_if(events.begin(), events.end(), [&](const Event& part) {
      return part.ticket == event.ticket && (part.kind == EventKind::kEncode || part.kind == EventKind::kWire);
    });
    EXPECT_EQ(static_cast<size_t>(num_kept), kParts) << "operation " << event.ticket;
  }
  EXPECT_EQ(log.take(false, false).size(), 2 * kOperations) << "without parts";
}

TEST(EventLog, TheOldestOperationsGoFirst) {
  constexpr uint64_t kKept = EventLog::kOperationSpans / 2;
  EventLog log;
  int64_t now_ns = 1000;
  std::vector<int64_t> begins_ns;
  for (uint64_t ticket = 0; ticket < kKept + 10; ++ticket) {
    begins_ns.push_back(now_ns);
    add_operation(log, ticket, 1, &now_ns);
  }
  const auto events = log.take(true);
  const auto kept = tickets(events, EventKind::kOperation);
  ASSERT_EQ(kept.size(), kKept);
  EXPECT_EQ(kept.front(), 10u);
  EXPECT_EQ(tickets(events, EventKind::kWire).size() + tickets(events, EventKind::kEncode).size(), kKept + 10);
  EXPECT_EQ(log.kept_since_ns().second, now_ns - 10) << "parts: the log was cleared";
  EXPECT_TRUE(log.take(false).empty());

  const int64_t begin_ns = now_ns;
  add_operation(log, 7, 1, &now_ns);
  EXPECT_EQ(log.take(false).size(), 3u);
  EXPECT_EQ(log.take(false, true, begin_ns - 1).size(), 3u);
  EXPECT_TRUE(log.take(false, true, now_ns).empty());
  EXPECT_LT(log.kept_since_ns().first, begin_ns);
}

TEST(EventLog, LossesOfOperationsAreToldByTheirEnd) {
  EventLog log;
  int64_t now_ns = 1000;
  for (uint64_t ticket = 0; ticket <= EventLog::kOperationSpans / 2; ++ticket) add_operation(log, ticket, 0, &now_ns);
  // Those of ticket 0 are lost, which took from 1000 to 1000.
  EXPECT_EQ(log.kept_since_ns(), (std::pair<int64_t, int64_t>{1000, 0}));
}

// Ranks that wait for some ranks only: all of a ring of four, and none of a ring of three.
TEST(EventLog, OperationsAmongNeighborsAreMarked) {
  for (const int size : {2, 3, 4}) {
    run_world(size, [size](Context& context, int rank) {
      std::vector<float> values(100, 1.0f);
      const int left = (rank + size - 1) % size, right = (rank + 1) % size;
      std::vector<collectives::Neighbor> neighbors{{rank, 1.0 / 2, false, false}, {left, 1.0 / 4, true, true}};
      if (left != right) neighbors.push_back({right, 1.0 / 4, true, true});
      context.events.set_ticket(1);
      perform(operation(OperationKind::kNeighborAverage, DType::kF32, values.size()), [&] {
        return collectives::neighbor_average(context, values.data(), values.size(), DType::kF32, neighbors, nullptr);
      });
      context.events.add(EventKind::kOperation, 1, 2, 1);
      context.events.set_ticket(2);
      context.events.add(EventKind::kOperation, 3, 4, 1);
      const auto events = context.events.take(true, false);
      require(events.size() == 2 && events[0].waits_for_some == (size > 3), "neighbor_average");
      require(!events[1].waits_for_some, "the operation after it");
    });
  }
}

}  // namespace
}  // namespace bagua::testing

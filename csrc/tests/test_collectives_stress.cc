// Random collectives of random type, size, operator, codec and memory on four ranks, started in one order by
// all and waited for in an order of each rank's own, over every transport, against the double-precision oracle. For
// the sanitizers, whose finds are order and lifetime. STRESS_CALLS calls, by default few; the seed is printed.
#include <cstdlib>
#include <random>

#include "csrc/codecs/codec.h"
#include "csrc/common/shared_segments.h"
#include "csrc/engine/engine.h"
#include "csrc/tests/test_collectives_values.h"
#include "csrc/tests/test_transport_pairs.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

constexpr size_t kSize = 4;
constexpr size_t kMostUnderWay = 8;

enum class CallKind {
  kAllReduce,
  kHierarchical,
  kReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kNeighbors,
  kMessage,
  kNumKinds
};

struct Plan {
  CallKind kind;
  DType dtype;
  ReduceOp op;
  size_t numel;
  const Codec* codec;
  int root;
  int peer;
  bool is_shared;
  bool is_inline;
};

Plan random_plan(std::mt19937_64& random) {
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  Plan plan{};
  plan.kind = static_cast<CallKind>(below(static_cast<size_t>(CallKind::kNumKinds)));
  do {
    plan.dtype = static_cast<DType>(below(kNumDTypes));
    plan.op = static_cast<ReduceOp>(below(kNumReduceOps));
  } while (!is_defined(plan.op, plan.dtype) || (plan.kind == CallKind::kNeighbors && !is_floating(plan.dtype)));
  const size_t limits[] = {1, 2, 100, 5000, 60'000};
  plan.numel = below(limits[below(5)]);
  const bool can_encode = is_floating(plan.dtype) && plan.dtype != DType::kF64 &&
                          (plan.op == ReduceOp::kSum || plan.op == ReduceOp::kAvg) && plan.kind != CallKind::kReduce &&
                          plan.kind != CallKind::kMessage;
  auto codecs = registered_codecs();
  std::erase_if(codecs, [](const auto& name) {
    return name == "centroid" || name == "onebit" || name == "topk";
  });  // no small error
  if (can_encode && below(3) == 0) plan.codec = &get_codec(codecs[below(codecs.size())]);
  plan.root = static_cast<int>(below(kSize));
  plan.peer = (plan.root + 1 + static_cast<int>(below(kSize - 1))) % static_cast<int>(kSize);
  plan.is_shared = below(3) == 0;
  plan.is_inline = below(3) == 0;
  return plan;
}

// Memory of the wanted kind, for as long as it lives.
class Memory {
 public:
  Memory(size_t num_bytes, bool is_shared) : bytes_(is_shared ? 0 : num_bytes), size_(num_bytes) {
    if (is_shared && num_bytes > 0) segment_ = SegmentRegistry::instance().create(num_bytes);
  }
  ~Memory() {
    if (segment_ != nullptr) SegmentRegistry::instance().release(segment_);
  }
  Memory(const Memory&) = delete;

  void* data() { return segment_ != nullptr ? segment_ : bytes_.data(); }
  void fill(const Bytes& from) {
    if (size_ > 0) std::memcpy(data(), from.data(), size_);
  }
  Bytes contents() {
    const auto* begin = static_cast<const uint8_t*>(data());
    return size_ > 0 ? Bytes(begin, begin + size_) : Bytes();
  }

 private:
  Bytes bytes_;
  const size_t size_;
  void* segment_ = nullptr;
};

// One call under way on one rank.
struct UnderWay {
  Plan plan;
  size_t rank;
  std::unique_ptr<Memory> input, output;
  std::shared_ptr<Work> work;
};

// Small enough with a codec for every codec's range and for sums of all ranks.
double fixture(const Plan& plan, size_t rank, size_t i) {
  const double x = value(plan.dtype, plan.op, kSize, rank, i);
  return plan.codec != nullptr ? std::fmod(x, 997) : x;
}

double reduced(const Plan& plan, size_t i) {
  double result = fixture(plan, 0, i);
  for (size_t r = 1; r < kSize; ++r) result = combine(plan.op, result, fixture(plan, r, i));
  if (plan.op == ReduceOp::kAvg) result /= static_cast<double>(kSize);
  return representable(plan.dtype, wrap(plan.dtype, result));
}

size_t blocks_in(const Plan& plan) {
  return plan.kind == CallKind::kReduceScatter || plan.kind == CallKind::kAllToAll ? kSize : 1;
}
size_t blocks_out(const Plan& plan) {
  return plan.kind == CallKind::kAllGather || plan.kind == CallKind::kAllToAll ? kSize
         : plan.kind == CallKind::kReduceScatter                               ? 1
                                                                               : 0;
}

uint64_t run_call(Context& context, const Plan& plan, void* in, void* out) {
  using namespace collectives;
  const auto& [kind, dtype, op, numel, codec, root, peer, is_shared, is_inline] = plan;
  const size_t bytes = numel * item_bytes(dtype);
  const std::vector<size_t> splits(kSize, codec != nullptr ? numel : bytes);
  switch (kind) {
    case CallKind::kAllReduce: return all_reduce(context, in, numel, dtype, op, codec);
    case CallKind::kHierarchical: {  // the ranks from `peer` on are a node of their own, if there are others
      std::vector<int> nodes[2];
      for (int rank = 0; rank < static_cast<int>(kSize); ++rank) nodes[rank >= peer].push_back(rank);
      std::vector<int> leaders{0};
      if (peer > 0) leaders.push_back(peer);
      return hierarchical_all_reduce(context, {nodes[context.group.rank() >= peer], leaders}, in, numel, dtype, op,
                                     codec);
    }
    case CallKind::kReduce: reduce(context, in, numel, dtype, op, root); return 0;
    case CallKind::kReduceScatter:
      if (codec != nullptr) return compressed_reduce_scatter(context, in, out, numel, dtype, op, *codec);
      reduce_scatter(context, in, out, numel, dtype, op);
      return 0;
    case CallKind::kAllGather:
      if (codec != nullptr) return compressed_all_gather(context, in, out, numel, dtype, *codec);
      all_gather(context, in, out, bytes);
      return 0;
    case CallKind::kAllToAll:
      if (codec != nullptr) return compressed_all_to_all(context, in, splits, out, splits, dtype, *codec);
      all_to_all(context, in, splits, out, splits);
      return 0;
    case CallKind::kBroadcast:
      if (codec != nullptr) return compressed_broadcast(context, in, numel, dtype, root, *codec);
      broadcast(context, in, bytes, root);
      return 0;
    case CallKind::kNeighbors: {
      const int rank = context.group.rank(), partner = rank ^ 1;
      std::vector<Neighbor> pair{{rank, 0.5, false, false}, {partner, 0.5, true, true}};
      if (partner < rank) std::swap(pair[0], pair[1]);
      return neighbor_average(context, in, numel, dtype, pair, codec);
    }
    default: return 0;
  }
}

OperationKind kind_of(CallKind kind) {
  constexpr OperationKind kinds[] = {
      OperationKind::kAllReduce,     OperationKind::kAllReduce,       OperationKind::kReduce,
      OperationKind::kReduceScatter, OperationKind::kAllGather,       OperationKind::kAllToAll,
      OperationKind::kBroadcast,     OperationKind::kNeighborAverage, OperationKind::kPointToPoint};
  return kinds[static_cast<size_t>(kind)];
}

// Each rank's collectives and messages have an engine of their own, as in a ProcessGroup.
UnderWay start(const Plan& plan, Engine& collectives, Engine& messages, size_t rank) {
  const size_t numel = plan.numel, in_numel = blocks_in(plan) * numel, item = item_bytes(plan.dtype);
  UnderWay started{plan, rank, std::make_unique<Memory>(in_numel * item, plan.is_shared),
                   std::make_unique<Memory>(blocks_out(plan) * numel * item, plan.is_shared), nullptr};
  Bytes inputs(in_numel * item);
  for (size_t i = 0; i < in_numel; ++i) store(plan.dtype, inputs, i, fixture(plan, rank, i));
  started.input->fill(inputs);
  Operation operation;
  operation.kind = kind_of(plan.kind);
  operation.dtype = plan.dtype;
  operation.numel = numel;
  void* const in = started.input->data();
  void* const out = started.output->data();
  if (plan.kind == CallKind::kMessage) {
    const auto r = static_cast<int>(rank);
    if (r == plan.root) started.work = messages.submit_send(plan.peer, in, numel * item, operation, 60s);
    if (r == plan.peer) started.work = messages.submit_recv(plan.root, in, numel * item, operation, 60s);
    return started;
  }
  const auto run = [=](Context& context) { return run_call(context, plan, in, out); };
  started.work =
      plan.is_inline ? collectives.run_inline(operation, 0, 60s, run) : collectives.submit(operation, 0, 60s, run);
  return started;
}

// The value that element i of the result must have.
double oracle(const UnderWay& call, size_t i) {
  const Plan& plan = call.plan;
  const auto of = [&](size_t rank, size_t at) { return fixture(plan, rank, at); };
  const size_t block = plan.numel == 0 ? 0 : i / plan.numel, within = plan.numel == 0 ? 0 : i % plan.numel;
  switch (plan.kind) {
    case CallKind::kReduceScatter: return reduced(plan, call.rank * plan.numel + i);
    case CallKind::kAllGather: return of(block, within);
    case CallKind::kAllToAll: return of(block, call.rank * plan.numel + within);
    case CallKind::kBroadcast:
    case CallKind::kMessage: return of(static_cast<size_t>(plan.root), i);
    case CallKind::kNeighbors: return representable(plan.dtype, 0.5 * (of(call.rank, i) + of(call.rank ^ 1, i)));
    default: return reduced(plan, i);
  }
}

// How far a codec is off, at most, in units of a block's largest magnitude.
double loss_of(const Codec& codec) {
  if (codec.name() == "fp4_e2m1") return 1.0 / 6;
  if (codec.name() == "fp4_e3m0") return 1.0 / 4;
  if (codec.name() == "fp8_e4m3") return 1.0 / 28;
  if (codec.name() == "fp8_e5m2") return 1.0 / 14;
  return codec.name() == "qsgd" ? 1.0 / 127 : 1.0 / 255;
}

void finish(UnderWay& call, const std::string& where) {
  if (!call.work) return;
  require(call.work->wait_for(60s), where + " does not end");
  if (const auto error = call.work->error()) throw Error(*error);
  const Plan& plan = call.plan;
  if (plan.kind == CallKind::kReduce && static_cast<int>(call.rank) != plan.root) return;
  const Bytes result = (blocks_out(plan) > 0 ? call.output : call.input)->contents();
  const size_t numel = result.size() / item_bytes(plan.dtype);
  // Every stage of a hierarchical sum rounds; the halves' fixtures have one sign.
  const bool is_half = plan.dtype == DType::kF16 || plan.dtype == DType::kBF16;
  const double allowed = plan.kind == CallKind::kHierarchical && is_half ? 4 * tolerance(plan.dtype, ReduceOp::kAvg)
                                                                         : tolerance(plan.dtype, plan.op);
  // Two encodings of at most `kSize` times 997.
  const double coding = plan.codec != nullptr ? 2.1 * 997 * static_cast<double>(kSize) * loss_of(*plan.codec) : 0;
  for (size_t i = 0; i < numel; ++i) {
    const double want = oracle(call, i), got = load(plan.dtype, result, i);
    if (std::fabs(got - want) <= allowed * std::fabs(want) + coding) continue;
    throw std::runtime_error(where + ": " + std::string(operation_name(kind_of(plan.kind))) + " of " +
                             name_of({plan.dtype, plan.op, plan.numel}) + " at " + std::to_string(i) + " gave " +
                             std::to_string(got) + ", expected " + std::to_string(want));
  }
}

class Stress : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Transports, Stress, ::testing::Values(kShm, kShmSmallRing, kTcp, kLocal), kind_name);

TEST_P(Stress, RandomCollectives) {
  const char* wanted = std::getenv("STRESS_CALLS");
  const size_t num_calls = wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : 600;
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu, %zu calls\n", static_cast<unsigned long long>(seed), num_calls);
  std::vector<std::unique_ptr<Engine>> collectives, messages;
  for (auto& communicator : make_communicators(kSize, GetParam()))
    collectives.push_back(std::make_unique<Engine>(std::move(communicator)));
  for (auto& communicator : make_communicators(kSize, GetParam()))
    messages.push_back(std::make_unique<Engine>(std::move(communicator)));
  const auto run_rank = [&](size_t rank) {
    std::mt19937_64 shared(seed), own(seed + rank + 1);
    std::vector<std::pair<size_t, UnderWay>> under_way;
    const auto where = [&](size_t index) { return "seed " + std::to_string(seed) + " call " + std::to_string(index); };
    for (size_t index = 0; index < num_calls; ++index) {
      under_way.emplace_back(index, start(random_plan(shared), *collectives[rank], *messages[rank], rank));
      while (under_way.size() >= kMostUnderWay || (!under_way.empty() && own() % 3 == 0)) {
        const auto which = under_way.begin() + static_cast<std::ptrdiff_t>(own() % under_way.size());
        finish(which->second, where(which->first));
        under_way.erase(which);
      }
    }
    for (auto& [index, call] : under_way) finish(call, where(index));
  };
  std::vector<std::function<void()>> ranks;
  for (size_t rank = 0; rank < kSize; ++rank) {
    ranks.push_back([&, rank] {
      try {
        run_rank(rank);
      } catch (const std::exception& failure) {  // the others stop waiting
        const Error cause(ErrorKind::kAborted, failure.what());
        for (auto* engines : {&collectives, &messages}) {
          for (auto& engine : *engines) engine->communicator().liveness().poison(cause);
        }
        throw;
      }
    });
  }
  run_together(ranks);
}

}  // namespace
}  // namespace bagua::testing

// In place: every collective, algorithm, codec and transport gives in the natural block of one buffer what it gives
// apart, and leaves the rest of the buffer as it was; and what else overlaps is refused, by a table of all positions.
#include <gtest/gtest.h>

#include <functional>

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/arguments.h"
#include "csrc/common/shared_segments.h"
#include "csrc/tests/test_collectives_values.h"
#include "csrc/tests/test_transport_pairs.h"
#include "csrc/tests/test_world.h"

namespace bagua::testing {
namespace {

using namespace collectives;

// Zeroed memory that peers of this host can map.
class SharedBytes {
 public:
  explicit SharedBytes(size_t bytes) : data_(static_cast<uint8_t*>(SegmentRegistry::instance().create(bytes))) {}
  ~SharedBytes() { SegmentRegistry::instance().release(data_); }
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
  uint8_t* data() { return data_; }

 private:
  uint8_t* data_;
};

struct Call {
  const void* input;
  void* output;
  size_t numel;  // of a block
  DType dtype;
  ReduceOp op;
  int root;

  size_t bytes() const { return numel * item_bytes(dtype); }
};

struct Way {
  OperationKind kind;
  std::string name;
  std::function<void(Context&, const Call&)> run;
  bool for_halves = true;
  bool needs_shared = false;
  bool is_coded = false;
};

template <typename Algorithm>
auto reducing(Algorithm algorithm) {
  return [algorithm](Context& context, const Call& call) {
    algorithm(context, call.input, call.output, call.numel, call.dtype, call.op);
  };
}

template <typename Algorithm>
auto moving(Algorithm algorithm) {
  return [algorithm](Context& context, const Call& call) { algorithm(context, call.input, call.output, call.bytes()); };
}

template <typename Algorithm>
auto rooted(Algorithm algorithm) {
  return [algorithm](Context& context, const Call& call) {
    algorithm(context, call.input, call.output, call.bytes(), call.root);
  };
}

// Runs an algorithm that says whether it could.
template <typename Algorithm>
auto surely(Algorithm algorithm) {
  return [algorithm](auto&&... arguments) { require(algorithm(arguments...), "the memory is shared"); };
}

std::vector<Way> all_ways() {
  std::vector<Way> ways = {
      {OperationKind::kReduceScatter, "reduce_scatter", reducing(reduce_scatter)},
      {OperationKind::kReduceScatter, "stripes_reduce_scatter", reducing(stripes_reduce_scatter)},
      {OperationKind::kReduceScatter, "ring_reduce_scatter", reducing(ring_reduce_scatter), false},
      {OperationKind::kReduceScatter, "direct_reduce_scatter", reducing(surely(direct_reduce_scatter)), true, true},
      {OperationKind::kAllGather, "all_gather", moving(all_gather)},
      {OperationKind::kAllGather, "pairwise_all_gather", moving(pairwise_all_gather)},
      {OperationKind::kAllGather, "ring_all_gather", moving(ring_all_gather)},
      {OperationKind::kAllGather, "direct_all_gather", moving(surely(direct_all_gather)), true, true},
      {OperationKind::kGather, "gather", rooted(gather)},
      {OperationKind::kScatter, "scatter", rooted(scatter)},
  };
  for (const std::string& spec : registered_codecs()) {
    const Codec* codec = &get_codec(spec);
    ways.push_back({OperationKind::kReduceScatter, "reduce_scatter with " + spec,
                    [codec](Context& context, const Call& call) {
                      compressed_reduce_scatter(context, call.input, call.output, call.numel, call.dtype, call.op,
                                                *codec);
                    },
                    true, false, true});
    ways.push_back({OperationKind::kAllGather, "all_gather with " + spec,
                    [codec](Context& context, const Call& call) {
                      compressed_all_gather(context, call.input, call.output, call.numel, call.dtype, *codec);
                    },
                    true, false, true});
  }
  return ways;
}

bool is_whole_input(OperationKind kind) {
  return kind == OperationKind::kReduceScatter || kind == OperationKind::kScatter;
}

// One rank's part of one collective: apart, with the output right behind the input, and in place.
class Comparison {
 public:
  Comparison(Context& context, const Way& way, Call call, bool is_shared)
      : context_(context),
        way_(way),
        call_(call),
        size_(static_cast<size_t>(context.group.size())),
        rank_(static_cast<size_t>(context.group.rank())),
        is_root_(way.kind == OperationKind::kReduceScatter || way.kind == OperationKind::kAllGather ||
                 static_cast<int>(rank_) == call.root),
        is_shared_(is_shared) {}

  void run() {
    const size_t block = call_.bytes(), whole = size_ * block;
    const Bytes contents = values(call_.dtype, call_.op, size_, rank_, size_ * call_.numel);
    const bool is_input_whole = is_whole_input(way_.kind);
    // [0, whole) is the large one, the block behind it the small one.
    Bytes apart = contents;
    apart.resize(whole + block, 0xee);
    if (!is_input_whole) std::copy_n(contents.begin() + static_cast<ptrdiff_t>(rank_ * block), block, &apart[whole]);
    const Bytes before = apart;
    perform_on(apart, whole);
    Bytes in_place = contents;
    in_place.resize(whole + block, 0xee);
    const size_t place = is_root_ ? rank_ * block : whole;
    if (!is_input_whole) std::copy_n(&before[whole], block, &in_place[place]);
    perform_on(in_place, place);
    if (is_input_whole) {
      require(std::equal(&apart[whole], &apart[whole] + block, &in_place[place]), what("differs in place"));
      if (!is_root_) return;
      std::copy_n(&contents[place], block, &in_place[place]);
      require(std::equal(in_place.begin(), in_place.begin() + static_cast<ptrdiff_t>(whole), contents.begin()),
              what("has changed other blocks of its input"));
      require(std::equal(before.begin(), before.begin() + static_cast<ptrdiff_t>(whole), apart.begin()),
              what("has changed its input"));
      check_result(&apart[whole]);
    } else if (is_root_) {
      require(std::equal(apart.begin(), apart.begin() + static_cast<ptrdiff_t>(whole), in_place.begin()),
              what("differs in place"));
      check_result(apart.data());
    }
  }

 private:
  std::string what(const char* problem) const {
    return way_.name + " " + problem + ": " + name_of({call_.dtype, call_.op, call_.numel}) + " among " +
           std::to_string(size_) + " ranks, rank " + std::to_string(rank_) + ", root " + std::to_string(call_.root);
  }

  void perform_on(Bytes& memory, size_t small) {
    std::optional<SharedBytes> shared;
    if (is_shared_) std::memcpy(shared.emplace(memory.size()).data(), memory.data(), memory.size());
    uint8_t* base = is_shared_ ? shared->data() : memory.data();
    Call call = call_;
    call.input = is_whole_input(way_.kind) ? base : base + small;
    call.output = is_whole_input(way_.kind) ? base + small : base;
    perform(operation(way_.kind, call.dtype, call.numel, call.op, call.root), [&] { way_.run(context_, call); });
    if (is_shared_) std::memcpy(memory.data(), base, memory.size());
  }

  // Against the definition; codes are compared apart and in place only.
  void check_result(const uint8_t* got) const {
    if (way_.is_coded) return;
    const bool reduces = way_.kind == OperationKind::kReduceScatter;
    const bool gathers = !is_whole_input(way_.kind);
    const Bytes have(got, got + (gathers ? size_ : 1) * call_.bytes());
    const size_t stride = call_.numel > 2000 ? 7 : 1;
    for (size_t i = 0; i < (gathers ? size_ : 1) * call_.numel; i += stride) {
      const size_t owner = gathers ? i / call_.numel : rank_;
      const size_t element = gathers ? i : rank_ * call_.numel + i;
      const double want = reduces ? expected(call_.dtype, call_.op, size_, element)
                                  : value(call_.dtype, call_.op, size_, owner, element);
      const double bound = reduces ? tolerance(call_.dtype, call_.op) * std::fabs(want) : 0;
      if (std::fabs(load(call_.dtype, have, i) - want) > bound) require(false, what("is wrong"));
    }
  }

  Context& context_;
  const Way& way_;
  const Call call_;
  const size_t size_;
  const size_t rank_;
  const bool is_root_;
  const bool is_shared_;
};

class InPlace : public ::testing::TestWithParam<std::tuple<Kind, int>> {};
INSTANTIATE_TEST_SUITE_P(Worlds, InPlace,
                         ::testing::Values(std::tuple(kLocal, 2), std::tuple(kLocal, 3), std::tuple(kLocal, 4),
                                           std::tuple(kShm, 2), std::tuple(kShm, 3), std::tuple(kTcp, 2),
                                           std::tuple(kTcp, 3), std::tuple(kTcp, 4), std::tuple(kTorch, 3)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + std::to_string(std::get<1>(info.param));
                         });

TEST_P(InPlace, GivesWhatItGivesApart) {
  const auto [kind, size] = GetParam();
  WorldOptions options;
  options.make_communicators = [kind = kind](int n) { return make_communicators(n, kind); };
  const std::vector<Way> ways = all_ways();
  const bool shares_memory = kind.ring_bytes != 0;  // threads over local channels share all memory
  // On both sides of 16 and 32 KiB, a chunk and more, and more chunks than go around together.
  const size_t numels[] = {1, 33, 4096, 4097, 8193, 40001, 150001, kCaseStride == 1 ? size_t{700001} : size_t{40001}};
  run_world(
      size,
      [&](Context& context, int) {
        int root = 0;
        for (const Way& way : ways) {
          for (const DType dtype : {DType::kF32, DType::kF64, DType::kI32, DType::kBF16}) {
            const bool is_half = dtype == DType::kBF16;
            const bool moves = way.kind != OperationKind::kReduceScatter && !way.is_coded;
            if (moves && dtype != DType::kF32) continue;  // bytes, of whatever type
            if ((is_half && !way.for_halves) || (way.is_coded && dtype != DType::kF32 && !is_half)) continue;
            for (const size_t numel : numels) {
              const bool is_large = numel > 100000;
              if (way.is_coded && numel != 33 && numel != 8193 && numel != 40001) continue;
              if (is_large && (way.is_coded || size != 3 || dtype != DType::kF32)) continue;
              const ReduceOp op = dtype == DType::kF32 && numel % 2 == 0 ? ReduceOp::kAvg : ReduceOp::kSum;
              root = (root + 1) % size;
              for (const bool is_shared : {false, true}) {
                if (is_shared ? !shares_memory : way.needs_shared && kind.has_control()) continue;
                if (is_large && shares_memory && is_shared != (numel > 500000)) continue;
                Comparison(context, way, {nullptr, nullptr, numel, dtype, op, root}, is_shared).run();
              }
            }
          }
        }
      },
      options);
}

// ---- what may overlap, for all positions of a block around a whole

bool shares_a_byte(const Argument& a, const Argument& b) {
  const auto *first = static_cast<const uint8_t*>(a.data), *second = static_cast<const uint8_t*>(b.data);
  for (size_t i = 0; i < a.bytes(); ++i) {
    for (size_t j = 0; j < b.bytes(); ++j) {
      if (first + i == second + j) return true;
    }
  }
  return false;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument, "wrong kind");
    return error.what();
  }
  return "";
}

TEST(Arguments, OnlyTheOwnBlockMayOverlap) {
  alignas(8) uint8_t memory[400] = {};
  int num_refused = 0, num_in_place = 0;
  for (const size_t numel : {0, 1, 3}) {
    for (const int rank : {0, 1, 2}) {
      const Argument whole{"input", memory + 100, 3 * numel, 4};
      for (size_t place = 60; place < 180; ++place) {
        const Argument block{"output", memory + place, numel, 4};
        const bool is_own = place == 100 + 4 * numel * static_cast<size_t>(rank);
        const bool shares = shares_a_byte(whole, block);
        const std::string message = refusal([&] { require_own_block_or_apart("reduce_scatter", whole, block, rank); });
        EXPECT_EQ(message.empty(), is_own || !shares) << message;
        EXPECT_EQ(refusal([&] { require_apart("all_to_all", whole, block); }).empty(), !shares);
        num_refused += !message.empty();
        num_in_place += is_own && shares;
      }
    }
  }
  EXPECT_GT(num_refused, 100);
  EXPECT_EQ(num_in_place, 6);
}

TEST(Arguments, MessagesSayWhereTheyLie) {
  float memory[20] = {};
  const auto output = [&](const void* data) { return Argument{"output", data, 4, 4}; };
  const Argument input{"input", memory + 4, 8, 4};
  const auto message = [&](const void* data) {
    return refusal([&] { require_own_block_or_apart("reduce_scatter", input, output(data), 1); });
  };
  EXPECT_EQ(message(memory + 5),
            "reduce_scatter: output (4 elements) begins 1 element after the beginning of input (8 elements) and "
            "overlaps it; in place, output is the block of this rank, from element 4 of input on; otherwise pass a "
            "copy (.clone(), numpy.copy)");
  EXPECT_CONTAINS(message(memory + 2), "output (4 elements) begins 2 elements before the beginning of input");
  EXPECT_CONTAINS(message(reinterpret_cast<uint8_t*>(memory + 4) + 3), "begins 3 bytes after");
  EXPECT_EQ(message(memory + 8), "");
  EXPECT_EQ(message(memory), "");
  EXPECT_EQ(message(memory + 12), "");
}

TEST(Arguments, WhatHasElementsHasMemory) {
  const Argument nothing{"input", nullptr, 0, 4}, lost{"input", nullptr, 3, 4};
  EXPECT_EQ(refusal([&] { require_memory("all_reduce", nothing); }), "");
  EXPECT_EQ(refusal([&] { require_memory("all_reduce", lost); }),
            "all_reduce: input has 3 elements but no memory: its address is 0");
  float memory[9] = {};
  const Argument there{"output", memory, 9, 4};
  EXPECT_NE(refusal([&] { require_apart("all_to_all", lost, there); }), "");
  EXPECT_NE(refusal([&] { require_own_block_or_apart("all_gather", there, lost, 0); }), "");
}

}  // namespace
}  // namespace bagua::testing

// The collectives and messages of a Group, as calls on addresses.
#include "csrc/collectives/collectives.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <pybind11/stl.h>

#include "csrc/bindings/callbacks.h"
#include "csrc/bindings/convert.h"
#include "csrc/bindings/group.h"
#include "csrc/bindings/topology.h"
#include "csrc/codecs/codec.h"
#include "csrc/collectives/arguments.h"
#include "csrc/kernels/nonfinite.h"

namespace bagua {
namespace {

using collectives::Argument;
using Submission = Group::Submission;

Argument argument(std::string_view name, uintptr_t address, size_t numel, DType dtype) {
  return {name, pointer(address), numel, item_bytes(dtype)};
}

// The collectives that work on one tensor.
void require_tensor(OperationKind kind, uintptr_t address, size_t numel, DType dtype) {
  collectives::require_memory(operation_name(kind), argument("tensor", address, numel, dtype));
}

Operation make_operation(OperationKind kind, uint64_t numel, DType dtype, ReduceOp op = ReduceOp::kSum, int root = -1) {
  Operation operation;
  operation.kind = kind;
  operation.reduce_op = op;
  operation.dtype = dtype;
  operation.numel = numel;
  operation.root = root;
  return operation;
}

// A codec by its name and options, and what it draws from if it rounds at random; none: the operation's number.
using CodecChoice = std::optional<std::pair<std::string, std::optional<uint64_t>>>;

// Enters the codec into the operation and returns it; null for none.
const Codec* use_codec(Operation& operation, const CodecChoice& codec) {
  if (!codec) return nullptr;
  const Codec& found = get_codec(codec->first);
  operation.codec = codec_number(found);
  return &found;
}

void set_subject(Operation& operation, uint32_t subject) {
  if (subject > kMaxSubject) throw py::value_error("a subject is from 0 to " + std::to_string(kMaxSubject));
  operation.variant |= subject << kSubjectShift;
}

std::shared_ptr<Work> run_coded(Group& g, const CodecChoice& codec, const Operation& operation, uint64_t bytes,
                                const Submission& submission, Engine::Run run) {
  if (!codec || !codec->second) return g.run(operation, bytes, submission, std::move(run));
  return g.run(operation, bytes, submission, [seed = *codec->second, run = std::move(run)](Context& context) {
    context.rng_key = derive_key(seed, static_cast<uint64_t>(context.group.rank()));
    return run(context);
  });
}

// The memory of error feedback: addresses of worker_in, worker_out, owner_in, owner_out, and their type.
using FeedbackChoice = std::optional<std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int>>;

collectives::Feedback use_feedback(Operation& operation, const FeedbackChoice& choice) {
  if (!choice) return {};
  operation.variant |= kWithFeedback;
  const auto& [worker_in, worker_out, owner_in, owner_out, dtype] = *choice;
  if ((worker_in == 0) != (worker_out == 0) || (owner_in == 0) != (owner_out == 0)) {
    throw Error(ErrorKind::kInvalidArgument,
                "residuals: one is read and another written, but one of them has no memory");
  }
  return {pointer(worker_in), pointer(worker_out), pointer(owner_in), pointer(owner_out), dtype_from(dtype), true};
}

// First element, number of elements and address of each segment.
using SegmentsChoice = std::vector<std::tuple<size_t, size_t, uintptr_t>>;

collectives::InputSegments use_segments(const SegmentsChoice& choice, DType dtype) {
  std::vector<collectives::InputSegment> segments;
  segments.reserve(choice.size());
  for (const auto& [begin, numel, address] : choice) {
    collectives::require_memory("parts", argument("a part", address, numel, dtype));
    segments.push_back({begin, numel, pointer(address)});
  }
  return collectives::InputSegments(std::move(segments));
}

// Looks at the result, on the CPU, of an operation that is to report whether it is finite. NaN and infinity of any rank
// are in every rank's result. A codec makes NaN of whole blocks, so one element of each tells; but f16 may overflow
// where it is decoded, in any element.
void look_at_result(Context& context, const void* data, size_t numel, DType dtype, const Codec* codec) {
  if (!context.stream.is_cpu()) return;
  const size_t stride = codec != nullptr && dtype != DType::kF16 ? codec->block_numel() : 1;
  context.is_result_finite = kernels::count_nonfinite(dtype, data, numel, stride) == 0;
}

uint64_t numel_of(size_t bytes, int dtype_code) { return bytes / item_bytes(dtype_from(dtype_code)); }

std::vector<size_t> in_bytes(std::vector<size_t> splits, DType dtype) {
  for (size_t& split : splits) split *= item_bytes(dtype);
  return splits;
}

Operation make_message(size_t bytes, int dtype, uint32_t tag) {
  Operation operation = make_operation(OperationKind::kPointToPoint, numel_of(bytes, dtype), dtype_from(dtype));
  operation.variant = tag;
  return operation;
}

void bind_reductions(py::class_<Group>& group) {
  group.def(
      "all_reduce",
      [](Group& g, uintptr_t data, size_t numel, int dtype_code, int op_code, const CodecChoice& codec,
         const Submission& submission, const FeedbackChoice& feedback, const SegmentsChoice& segments,
         bool checks_result, uint32_t subject) {
        const DType dtype = dtype_from(dtype_code);
        const auto op = static_cast<ReduceOp>(op_code);
        require_tensor(OperationKind::kAllReduce, data, numel, dtype);
        Operation operation = make_operation(OperationKind::kAllReduce, numel, dtype, op);
        set_subject(operation, subject);
        const Codec* used = use_codec(operation, codec);
        const auto residuals = use_feedback(operation, feedback);
        return run_coded(g, codec, operation, numel * item_bytes(dtype), submission,
                         [=, taken = use_segments(segments, dtype)](Context& context) {
                           const size_t num_blocks = collectives::all_reduce(context, pointer(data), numel, dtype, op,
                                                                             used, residuals, taken);
                           const Codec* encoded = context.group.size() > 1 ? used : nullptr;
                           if (checks_result) look_at_result(context, pointer(data), numel, dtype, encoded);
                           return num_blocks;
                         });
      },
      py::arg("data"), py::arg("numel"), py::arg("dtype"), py::arg("op"), py::arg("codec"), py::arg("submission"),
      py::arg("feedback") = py::none(), py::arg("parts") = SegmentsChoice{}, py::arg("checks_result") = false,
      py::arg("subject") = 0);
  group.def(
      "hierarchical_all_reduce",
      [](Group& g, const std::vector<int>& node, const std::vector<int>& leaders, uintptr_t data, size_t numel,
         int dtype_code, int op_code, const CodecChoice& codec, const Submission& submission,
         const FeedbackChoice& feedback, const SegmentsChoice& segments, bool checks_result, uint32_t subject) {
        const DType dtype = dtype_from(dtype_code);
        const auto op = static_cast<ReduceOp>(op_code);
        require_tensor(OperationKind::kAllReduce, data, numel, dtype);
        Operation operation = make_operation(OperationKind::kAllReduce, numel, dtype, op);
        operation.variant = kHierarchical;
        set_subject(operation, subject);
        const Codec* used = use_codec(operation, codec);
        const auto residuals = use_feedback(operation, feedback);
        return run_coded(g, codec, operation, numel * item_bytes(dtype), submission,
                         [=, hierarchy = collectives::Hierarchy{node, leaders},
                          taken = use_segments(segments, dtype)](Context& context) {
                           const size_t num_blocks = collectives::hierarchical_all_reduce(
                               context, hierarchy, pointer(data), numel, dtype, op, used, residuals, taken);
                           const Codec* encoded = hierarchy.leaders.size() > 1 ? used : nullptr;
                           if (checks_result) look_at_result(context, pointer(data), numel, dtype, encoded);
                           return num_blocks;
                         });
      },
      py::arg("node"), py::arg("leaders"), py::arg("data"), py::arg("numel"), py::arg("dtype"), py::arg("op"),
      py::arg("codec"), py::arg("submission"), py::arg("feedback") = py::none(), py::arg("parts") = SegmentsChoice{},
      py::arg("checks_result") = false, py::arg("subject") = 0);
  group.def("reduce", [](Group& g, uintptr_t data, size_t numel, int dtype_code, int op_code, int root,
                         const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    const auto op = static_cast<ReduceOp>(op_code);
    require_tensor(OperationKind::kReduce, data, numel, dtype);
    return g.run(make_operation(OperationKind::kReduce, numel, dtype, op, root), numel * item_bytes(dtype), submission,
                 [=](Context& context) -> uint64_t {
                   collectives::reduce(context, pointer(data), numel, dtype, op, root);
                   return 0;
                 });
  });
  group.def(
      "reduce_scatter",
      [](Group& g, uintptr_t input, uintptr_t output, size_t numel, int dtype_code, int op_code,
         const CodecChoice& codec, const Submission& submission, const FeedbackChoice& feedback, bool checks_result) {
        const DType dtype = dtype_from(dtype_code);
        const auto op = static_cast<ReduceOp>(op_code);
        collectives::require_own_block_or_apart(
            "reduce_scatter", argument("input", input, numel * static_cast<size_t>(g.communicator().size()), dtype),
            argument("output", output, numel, dtype), g.communicator().rank());
        Operation operation = make_operation(OperationKind::kReduceScatter, numel, dtype, op);
        const Codec* used = use_codec(operation, codec);
        const auto residuals = use_feedback(operation, feedback);
        return run_coded(g, codec, operation, numel * item_bytes(dtype), submission, [=](Context& context) -> uint64_t {
          if (used == nullptr) {
            collectives::reduce_scatter(context, pointer(input), pointer(output), numel, dtype, op);
            return 0;
          }
          const size_t num_blocks = collectives::compressed_reduce_scatter(context, pointer(input), pointer(output),
                                                                           numel, dtype, op, *used, residuals);
          if (checks_result) look_at_result(context, pointer(output), numel, dtype, nullptr);
          return num_blocks;
        });
      },
      py::arg("input"), py::arg("output"), py::arg("numel"), py::arg("dtype"), py::arg("op"), py::arg("codec"),
      py::arg("submission"), py::arg("feedback") = py::none(), py::arg("checks_result") = false);
  group.def(
      "neighbor_average", [](Group& g, uintptr_t data, size_t numel, int dtype_code, int topology, uint64_t step,
                             const CodecChoice& codec, const Submission& submission, const SegmentsChoice& segments) {
        const DType dtype = dtype_from(dtype_code);
        require_tensor(OperationKind::kNeighborAverage, data, numel, dtype);
        Operation operation = make_operation(OperationKind::kNeighborAverage, numel, dtype, ReduceOp::kAvg, topology);
        operation.variant = static_cast<uint32_t>(step) & ~kHierarchical;  // the low bits tell different steps apart
        const Codec* used = use_codec(operation, codec);
        const auto neighbors = topology_neighbors(topology, g.communicator().size(), g.communicator().rank(), step);
        return run_coded(g, codec, operation, numel * item_bytes(dtype), submission,
                         [=, taken = use_segments(segments, dtype)](Context& context) {
                           return collectives::neighbor_average(context, pointer(data), numel, dtype, neighbors, used,
                                                                taken);
                         });
      });
  group.def("hierarchical_neighbor_average", [](Group& g, const std::vector<int>& node, const std::vector<int>& leaders,
                                                int smallest_node, uintptr_t data, size_t numel, int dtype_code,
                                                int topology, uint64_t step, const CodecChoice& codec,
                                                const Submission& submission, const SegmentsChoice& segments) {
    const DType dtype = dtype_from(dtype_code);
    require_tensor(OperationKind::kNeighborAverage, data, numel, dtype);
    Operation operation = make_operation(OperationKind::kNeighborAverage, numel, dtype, ReduceOp::kAvg, topology);
    operation.variant = static_cast<uint32_t>(step) | kHierarchical;
    const Codec* used = use_codec(operation, codec);
    const auto leader = std::find(leaders.begin(), leaders.end(), node.at(0)) - leaders.begin();
    const auto neighbors =
        topology_neighbors(topology, static_cast<int>(leaders.size()), static_cast<int>(leader), step);
    return run_coded(g, codec, operation, numel * item_bytes(dtype), submission,
                     [=, hierarchy = collectives::Hierarchy{node, leaders},
                      taken = use_segments(segments, dtype)](Context& context) {
                       return collectives::hierarchical_neighbor_average(
                           context, hierarchy, smallest_node, pointer(data), numel, dtype, neighbors, used, taken);
                     });
  });
  group.def("difference_ring_average", [](Group& g, uintptr_t data, size_t numel, int dtype_code, uintptr_t own,
                                          uintptr_t left, uintptr_t right, const CodecChoice& codec,
                                          const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    require_tensor(OperationKind::kDifferenceRingAverage, data, numel, dtype);
    Operation operation = make_operation(OperationKind::kDifferenceRingAverage, numel, dtype);
    const Codec* used = use_codec(operation, codec);
    if (used == nullptr) throw py::value_error("difference_ring_average needs a codec");
    for (const uintptr_t replica : {own, left, right}) {
      collectives::require_memory("difference_ring_average", argument("a replica", replica, numel, DType::kF32));
    }
    const auto f32 = [](uintptr_t address) { return static_cast<float*>(pointer(address)); };
    return run_coded(g, codec, operation, numel * item_bytes(dtype), submission,
                     [=, replicas = collectives::Replicas{f32(own), f32(left), f32(right)}](Context& context) {
                       return collectives::difference_ring_average(context, pointer(data), numel, dtype, replicas,
                                                                   *used);
                     });
  });
}

void bind_movements(py::class_<Group>& group) {
  group.def(
      "all_gather",
      [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype_code, const CodecChoice& codec,
         const Submission& submission, uint32_t subject) {
        const DType dtype = dtype_from(dtype_code);
        const size_t numel = numel_of(bytes, dtype_code);
        collectives::require_own_block_or_apart(
            "all_gather", argument("output", output, numel * static_cast<size_t>(g.communicator().size()), dtype),
            argument("input", input, numel, dtype), g.communicator().rank());
        Operation operation = make_operation(OperationKind::kAllGather, numel, dtype);
        set_subject(operation, subject);
        const Codec* used = use_codec(operation, codec);
        return run_coded(g, codec, operation, bytes, submission, [=](Context& context) -> uint64_t {
          if (used != nullptr) {
            return collectives::compressed_all_gather(context, pointer(input), pointer(output), numel, dtype, *used);
          }
          collectives::all_gather(context, pointer(input), pointer(output), bytes);
          return 0;
        });
      },
      py::arg("input"), py::arg("output"), py::arg("bytes"), py::arg("dtype"), py::arg("codec"), py::arg("submission"),
      py::arg("subject") = 0);
  group.def("all_to_all", [](Group& g, uintptr_t input, std::vector<size_t> input_splits, uintptr_t output,
                             std::vector<size_t> output_splits, int dtype_code, const CodecChoice& codec,
                             size_t row_numel, const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    const size_t input_numel = std::accumulate(input_splits.begin(), input_splits.end(), size_t{0});
    const size_t output_numel = std::accumulate(output_splits.begin(), output_splits.end(), size_t{0});
    collectives::require_apart("all_to_all", argument("input", input, input_numel, dtype),
                               argument("output", output, output_numel, dtype));
    Operation operation = make_operation(OperationKind::kAllToAll, 0, dtype);
    const Codec* used = use_codec(operation, codec);
    const size_t bytes = input_numel * item_bytes(dtype);
    return run_coded(g, codec, operation, bytes, submission, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_all_to_all(context, pointer(input), input_splits, pointer(output), output_splits,
                                                  dtype, *used, row_numel);
      }
      collectives::all_to_all(context, pointer(input), in_bytes(input_splits, dtype), pointer(output),
                              in_bytes(output_splits, dtype));
      return 0;
    });
  });
  group.def("broadcast", [](Group& g, uintptr_t data, size_t bytes, int dtype_code, int root, const CodecChoice& codec,
                            const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    const size_t numel = numel_of(bytes, dtype_code);
    require_tensor(OperationKind::kBroadcast, data, numel, dtype);
    Operation operation = make_operation(OperationKind::kBroadcast, numel, dtype, ReduceOp::kSum, root);
    const Codec* used = use_codec(operation, codec);
    return run_coded(g, codec, operation, bytes, submission, [=](Context& context) -> uint64_t {
      if (used != nullptr) {
        return collectives::compressed_broadcast(context, pointer(data), numel, dtype, root, *used);
      }
      collectives::broadcast(context, pointer(data), bytes, root);
      return 0;
    });
  });
  group.def("gather", [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype_code, int root,
                         const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    const size_t numel = numel_of(bytes, dtype_code);
    const size_t gathered = g.communicator().rank() == root ? numel * static_cast<size_t>(g.communicator().size()) : 0;
    collectives::require_own_block_or_apart("gather", argument("output", output, gathered, dtype),
                                            argument("input", input, numel, dtype), root);
    return g.run(make_operation(OperationKind::kGather, numel, dtype, ReduceOp::kSum, root), bytes, submission,
                 [=](Context& context) -> uint64_t {
                   collectives::gather(context, pointer(input), pointer(output), bytes, root);
                   return 0;
                 });
  });
  group.def("scatter", [](Group& g, uintptr_t input, uintptr_t output, size_t bytes, int dtype_code, int root,
                          const Submission& submission) {
    const DType dtype = dtype_from(dtype_code);
    const size_t numel = numel_of(bytes, dtype_code);
    const size_t scattered = g.communicator().rank() == root ? numel * static_cast<size_t>(g.communicator().size()) : 0;
    collectives::require_own_block_or_apart("scatter", argument("input", input, scattered, dtype),
                                            argument("output", output, numel, dtype), root);
    return g.run(make_operation(OperationKind::kScatter, numel, dtype, ReduceOp::kSum, root), bytes, submission,
                 [=](Context& context) -> uint64_t {
                   collectives::scatter(context, pointer(input), pointer(output), bytes, root);
                   return 0;
                 });
  });
  group.def("barrier", [](Group& g, const Submission& submission) {
    return g.run(make_operation(OperationKind::kBarrier, 0, DType::kU8), 0, submission,
                 [](Context& context) -> uint64_t {
                   collectives::barrier(context);
                   return 0;
                 });
  });
  group.def("send", [](Group& g, uintptr_t data, size_t bytes, int dtype, int peer, uint32_t tag,
                       const Submission& submission) {
    collectives::require_memory("send", argument("tensor", data, numel_of(bytes, dtype), dtype_from(dtype)));
    return g.send(peer, pointer(data), bytes, make_message(bytes, dtype, tag), submission);
  });
  group.def("recv", [](Group& g, uintptr_t data, size_t bytes, int dtype, int peer, uint32_t tag,
                       const Submission& submission) {
    collectives::require_memory("recv", argument("tensor", data, numel_of(bytes, dtype), dtype_from(dtype)));
    return g.recv(peer, pointer(data), bytes, make_message(bytes, dtype, tag), submission);
  });
}

}  // namespace

void bind_collectives(py::class_<Group>& group) {
  bind_reductions(group);
  bind_movements(group);
}

}  // namespace bagua

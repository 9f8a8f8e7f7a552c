// bagua._C.plan_buckets and bagua._C.StepMachine: the Rust ordering core for Python, through its C ABI.
//
// Data path: gradient sizes -> plan_buckets -> layout; what happens in a step -> StepMachine -> what to do next.
//
// Ownership: a StepMachine owns its Rust handle. The GIL is kept throughout: no call blocks, ready is far cheaper
// than releasing it, and it is what serialises the calls on a machine, whose hooks run on several autograd threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/call_rust.h"

namespace py = pybind11;

namespace bagua {
namespace {

// The layouts that rust_core/src/ffi.rs tests on its side.
static_assert(sizeof(BaguaRustError) == 260 && offsetof(BaguaRustError, message) == 4);
static_assert(sizeof(BaguaTensorSpec) == 24 && offsetof(BaguaTensorSpec, item_bytes) == 16);
static_assert(sizeof(BaguaPlanOptions) == 24 && offsetof(BaguaPlanOptions, align_bytes) == 16);

using List = std::vector<uint64_t>;

void check_length(const char* argument, size_t length, size_t expected) {
  if (length == expected) return;
  throw Error(ErrorKind::kInvalidArgument,
              std::string(argument) + " has " + std::to_string(length) + " entries; expected " +
                  std::to_string(expected) + ", as many as numels; pass one entry per tensor",
              /*rank=*/-1, "plan_buckets");
}

std::tuple<List, List, List> plan_buckets(const List& numels, const std::vector<uint32_t>& item_bytes, const List& keys,
                                          const List& order, uint64_t small_bucket_bytes, uint64_t bucket_bytes,
                                          uint64_t align_bytes) {
  const size_t num_tensors = numels.size();
  check_length("item_bytes", item_bytes.size(), num_tensors);
  check_length("keys", keys.size(), num_tensors);
  std::vector<BaguaTensorSpec> tensors(num_tensors);
  for (size_t i = 0; i < num_tensors; ++i) tensors[i] = {numels[i], keys[i], item_bytes[i]};
  const BaguaPlanOptions options = {small_bucket_bytes, bucket_bytes, align_bytes};
  List bucket_of(num_tensors), offset_numel_of(num_tensors), bucket_numels(num_tensors);
  uint64_t num_buckets = 0;
  call_rust("plan_buckets", bagua_plan, tensors.data(), num_tensors, order.data(), order.size(), &options,
            bucket_of.data(), offset_numel_of.data(), bucket_numels.data(), &num_buckets);
  bucket_numels.resize(num_buckets);
  return {std::move(bucket_of), std::move(offset_numel_of), std::move(bucket_numels)};
}

class StepMachine {
 public:
  StepMachine(uint64_t num_tensors, bool finds_unused) : num_tensors_(num_tensors) {
    BaguaStep* step = nullptr;
    call_rust("StepMachine", bagua_step_new, num_tensors, finds_unused, &step);
    handle_.reset(step);
  }

  template <typename Function, typename... Arguments>
  void call(const char* operation, Function function, Arguments... arguments) const {
    call_rust(operation, function, handle_.get(), arguments...);
  }

  // Calls a function whose one output comes last.
  template <typename Output, typename Function, typename... Arguments>
  Output get(const char* operation, Function function, Arguments... arguments) const {
    Output output{};
    call(operation, function, arguments..., &output);
    return output;
  }

  std::optional<List> list(const char* operation, decltype(&bagua_step_missing) function) const {
    List tensors(num_tensors_);
    const auto num = get<uint64_t>(operation, function, tensors.data(), num_tensors_);
    if (num == BAGUA_NO_LIST) return std::nullopt;
    tensors.resize(num);
    return tensors;
  }

 private:
  struct Free {  // which cannot fail for a handle that is not null
    void operator()(BaguaStep* step) const {
      BaguaRustError error;
      bagua_step_free(step, &error);
    }
  };

  uint64_t num_tensors_;
  std::unique_ptr<BaguaStep, Free> handle_;
};

std::optional<std::pair<uint32_t, uint64_t>> next(const StepMachine& step) {
  std::pair<uint32_t, uint64_t> decision;
  step.call("next", bagua_step_next, &decision.first, &decision.second);
  return decision.first == BAGUA_NOTHING ? std::nullopt : std::optional(decision);
}

std::pair<bool, uint64_t> state(const StepMachine& step) {
  std::pair<bool, uint64_t> state;
  step.call("state", bagua_step_state, &state.first, &state.second);
  return state;
}

constexpr const char* kPlanDoc = R"(Lays tensors out in buckets: a pure function of its arguments.

numels, item_bytes and keys describe one tensor per entry (elements, bytes per element, opaque class; tensors of
different keys never share a bucket). order is a permutation of the tensor indices, expected to be ready first, first.
A bucket closes when the next tensor would take it past its cap; a larger tensor gets a bucket of its own. The cap is
what of its key lies in earlier buckets, or half of what does not, whichever is less; but at least small_bucket_bytes
and at most bucket_bytes. Tensors start at multiples of align_bytes, a power of two.

Returns (bucket_of, offset_numel_of, bucket_numels): by tensor its bucket and its first element in there, and by bucket
its elements, padding included. Buckets are numbered in launch order; the tensor that comes earlier in order lies first.

Raises InvalidArgument: order is no permutation, a limit or an item size is 0, item sizes differ within a key,
align_bytes is no power of two or no multiple of an item size, a size passes 64 bits.

>>> plan_buckets([20, 10, 3, 20], [4, 4, 4, 4], [0, 0, 0, 0], [3, 2, 1, 0], 64, 256, 64)
([2, 1, 1, 0], [0, 16, 0, 0], [32, 32, 32]))";

constexpr const char* kStepDoc = R"(What happens in a training step in, what is to be done next out, alike on all ranks.

One per wrapped model, for num_tensors tensors; finds_unused: a backward may leave tensors out. Buckets are launched
strictly in the order of their numbers, before finish only when all their tensors are ready. A bucket whose
communication was suspended is resumed once two more buckets are launched, or at the end of backward: at a point in the
launch order, never at a time of completion. Before the first set_stage gradients are exchanged.

next() gives (decision, bucket), bucket being 0 where none is meant:
LAUNCH, RESUME, WAIT          start the bucket's communication, go on with it, wait for it
AGREE_ON_USE, FINALIZE_USE    start the message about which tensors were used, take in what it brought
SEND_BUFFERS                  start the message with rank 0's buffers
AGREE_ON_ORDER                agree with them on rank 0's observed order, and call agree
finish() gives UNTOUCHED, INCOMPLETE or COMPLETE. Raises InvalidArgument, which leaves all as it was.

>>> step = StepMachine(3, finds_unused=False)
>>> step.lay_out([0, 1, 2], order=[0, 1, 2])
>>> step.begin()
>>> step.ready(1), step.ready(0), step.next() == (step.LAUNCH, 0)
(False, True, True)
>>> step.suspended(0)
>>> step.next() == (step.LAUNCH, 1), step.next(), step.ready(2)
(True, None, True)
>>> step.finish() == step.COMPLETE
True
>>> [step.next() for _ in range(8)]
[(1, 2), (2, 0), (6, 0), (3, 0), (3, 1), (3, 2), (7, 0), None]
>>> step.observed_order()
[1, 0, 2])";

void bind_step_constants(py::class_<StepMachine>& machine) {
  const std::pair<const char*, int> constants[] = {
      {"LAUNCH", BAGUA_LAUNCH},
      {"RESUME", BAGUA_RESUME},
      {"WAIT", BAGUA_WAIT},
      {"AGREE_ON_USE", BAGUA_AGREE_ON_USE},
      {"FINALIZE_USE", BAGUA_FINALIZE_USE},
      {"SEND_BUFFERS", BAGUA_SEND_BUFFERS},
      {"AGREE_ON_ORDER", BAGUA_AGREE_ON_ORDER},
      {"UNTOUCHED", BAGUA_UNTOUCHED},
      {"INCOMPLETE", BAGUA_INCOMPLETE},
      {"COMPLETE", BAGUA_COMPLETE},
  };
  for (const auto& [name, value] : constants) machine.attr(name) = value;
}

void bind_step_events(py::class_<StepMachine>& machine) {
  using Step = StepMachine;
  machine
      .def(
          "lay_out",
          [](const Step& step, const List& bucket_of, const List& order) {
            step.call("lay_out", bagua_step_lay_out, bucket_of.data(), bucket_of.size(), order.data(), order.size());
          },
          py::arg("bucket_of"), py::arg("order"),
          "Takes a new layout, by tensor its bucket, and the ready order that it was made for; what is left of a\n"
          "finished step is dropped. Raises InvalidArgument: a step is open, bucket_of has gaps or another length,\n"
          "order is no permutation.")
      .def(
          "set_stage",
          [](const Step& step, int64_t stage, bool launches) {
            return step.get<bool>("set_stage", bagua_step_set_stage, stage, launches);
          },
          py::arg("stage"), py::arg("launches"),
          "The algorithm is in this stage now. launches: gradients are exchanged, in backward; otherwise nothing is\n"
          "launched. Returns whether stage or launches has changed, or this is the first call: the buckets are to be\n"
          "laid out anew. Raises InvalidArgument: one of the two has changed while a step is open.")
      .def(
          "begin", [](const Step& step) { step.call("begin", bagua_step_begin); },
          "Opens a step with no tensor ready; one that is open (its backward raised) is dropped. Raises\n"
          "InvalidArgument: no buckets are laid out.")
      .def(
          "ready", [](const Step& step, uint64_t tensor) { return step.get<bool>("ready", bagua_step_ready, tensor); },
          py::arg("tensor"),
          "The tensor's gradient is there; returns whether there are decisions to take. Raises InvalidArgument: no\n"
          "step is open, no such tensor, or it is already ready in this step.")
      .def("next", &next, "Takes the next decision, (decision, bucket); None if there is nothing to do now.")
      .def(
          "suspended", [](const Step& step, uint64_t bucket) { step.call("suspended", bagua_step_suspended, bucket); },
          py::arg("bucket"),
          "The communication of the bucket goes on later. Raises InvalidArgument: it is not the one that was\n"
          "launched or resumed last.")
      .def(
          "finish", [](const Step& step) { return step.get<uint32_t>("finish", bagua_step_finish); },
          "Backward's computation is over: UNTOUCHED (no tensor became ready) and INCOMPLETE (some did not), both of\n"
          "which drop the step and are impossible if the machine finds unused tensors, or COMPLETE. Raises\n"
          "InvalidArgument: no step is open.")
      .def(
          "abort", [](const Step& step) { step.call("abort", bagua_step_abort); },
          "Backward raised: the step is dropped, if there is one.")
      .def(
          "agree",
          [](const Step& step, const List& order) { step.call("agree", bagua_step_agree, order.data(), order.size()); },
          py::arg("order"), "The ranks have agreed on this ready order. Raises InvalidArgument: it is no permutation.");
}

void bind_step_knowledge(py::class_<StepMachine>& machine) {
  using Step = StepMachine;
  machine
      .def_property_readonly(
          "is_open", [](const Step& step) { return state(step).first; },
          "Whether a step is open: from begin to finish or abort.")
      .def_property_readonly(
          "num_launched", [](const Step& step) { return state(step).second; },
          "How many buckets are launched in this step, or were in the last one.")
      .def_property_readonly(
          "order", [](const Step& step) { return step.list("order", bagua_step_agreed_order); },
          "The agreed ready order; None while there is none.")
      .def(
          "layout_due", [](const Step& step) { return step.list("layout_due", bagua_step_layout_due); },
          "The agreed ready order while the buckets are not laid out for it, else None.")
      .def(
          "missing", [](const Step& step) { return *step.list("missing", bagua_step_missing); },
          "The tensors that are not ready, ascending; after the step's end, those that never became ready.")
      .def(
          "observed_order", [](const Step& step) { return *step.list("observed_order", bagua_step_observed_order); },
          "All tensors, in the order in which they became ready in the last complete step, those that did not in the\n"
          "layout's order behind them; in a new layout, in its order.");
}

}  // namespace

void bind_order(py::module_& m) {
  m.def("plan_buckets", &plan_buckets, py::arg("numels"), py::arg("item_bytes"), py::arg("keys"), py::arg("order"),
        py::arg("small_bucket_bytes"), py::arg("bucket_bytes"), py::arg("align_bytes"), kPlanDoc);
  py::class_<StepMachine> machine(m, "StepMachine", kStepDoc);
  machine.def(py::init<uint64_t, bool>(), py::arg("num_tensors"), py::arg("finds_unused"));
  bind_step_constants(machine);
  bind_step_events(machine);
  bind_step_knowledge(machine);
}

}  // namespace bagua

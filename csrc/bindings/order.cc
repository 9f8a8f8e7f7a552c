// bagua._C.BucketPlan and bagua._C.ReadyOrderScheduler: the Rust ordering core for Python, through its C ABI.
//
// Data path: gradient sizes -> BucketPlan -> layout; gradient hook -> ReadyOrderScheduler -> buckets to launch.
//
// Ownership: each object owns one Rust handle; a scheduler copies what it needs from its plan. The GIL is
// kept throughout: no call blocks, mark_ready is far cheaper than releasing it, and it is what serialises
// the calls on a scheduler, whose hooks run on several autograd threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/call_rust.h"

namespace py = pybind11;

namespace bagua {
namespace {

// The layouts that rust_core/src/abi_types.rs tests on its side.
static_assert(sizeof(BaguaRustError) == 260 && offsetof(BaguaRustError, message) == 4);
static_assert(sizeof(BaguaTensorSpec) == 24 && offsetof(BaguaTensorSpec, item_bytes) == 16);
static_assert(sizeof(BaguaPlanOptions) == 24 && offsetof(BaguaPlanOptions, align_bytes) == 16);
static_assert(sizeof(BaguaBucketInfo) == 32 && offsetof(BaguaBucketInfo, item_bytes) == 24);
static_assert(sizeof(BaguaBucketMember) == 24 && offsetof(BaguaBucketMember, numel) == 16);
static_assert(sizeof(BaguaBucketRange) == 16 && offsetof(BaguaBucketRange, last) == 8);

// Freeing a handle that is not null cannot fail.
struct FreeHandle {
  void operator()(BaguaPlan* plan) const {
    BaguaRustError error;
    bagua_plan_free(plan, &error);
  }
  void operator()(BaguaScheduler* scheduler) const {
    BaguaRustError error;
    bagua_scheduler_free(scheduler, &error);
  }
};

struct PlannedBucket {
  uint64_t key;
  uint32_t item_bytes;
  uint64_t numel;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> members;  // tensor, offset_numel, numel
};

void check_length(const char* argument, size_t length, size_t expected) {
  if (length == expected) return;
  throw Error(ErrorKind::kInvalidArgument,
              std::string(argument) + " has " + std::to_string(length) + " entries; expected " +
                  std::to_string(expected) + ", as many as numels; pass one entry per tensor",
              /*rank=*/-1, "BucketPlan");
}

class BucketPlan {
 public:
  BucketPlan(const std::vector<uint64_t>& numels, const std::vector<uint32_t>& item_bytes,
             const std::vector<uint64_t>& keys, const std::vector<uint64_t>& order, uint64_t small_bucket_bytes,
             uint64_t bucket_bytes, uint64_t align_bytes)
      : num_tensors_(numels.size()) {
    check_length("item_bytes", item_bytes.size(), numels.size());
    check_length("keys", keys.size(), numels.size());
    std::vector<BaguaTensorSpec> tensors(numels.size());
    for (size_t i = 0; i < numels.size(); ++i) tensors[i] = {numels[i], keys[i], item_bytes[i]};
    const BaguaPlanOptions options = {small_bucket_bytes, bucket_bytes, align_bytes};
    BaguaPlan* plan = nullptr;
    call_rust("BucketPlan", bagua_plan_new, tensors.data(), tensors.size(), order.data(), order.size(), &options,
              &plan);
    handle_.reset(plan);
  }

  std::vector<PlannedBucket> buckets() const {
    uint64_t num_buckets = 0;
    call_rust("buckets", bagua_plan_num_buckets, handle_.get(), &num_buckets);
    std::vector<PlannedBucket> buckets;
    buckets.reserve(num_buckets);
    for (uint64_t i = 0; i < num_buckets; ++i) buckets.push_back(bucket(i));
    return buckets;
  }

  const BaguaPlan* handle() const { return handle_.get(); }
  size_t num_tensors() const { return num_tensors_; }

 private:
  PlannedBucket bucket(uint64_t index) const {
    BaguaBucketInfo info;
    call_rust("buckets", bagua_plan_bucket, handle_.get(), index, &info);
    std::vector<BaguaBucketMember> members(info.num_members);
    call_rust("buckets", bagua_plan_bucket_members, handle_.get(), index, members.data(), members.size());
    PlannedBucket bucket{info.key, info.item_bytes, info.numel, {}};
    bucket.members.reserve(members.size());
    for (const auto& member : members) {
      bucket.members.emplace_back(member.tensor, member.offset_numel, member.numel);
    }
    return bucket;
  }

  size_t num_tensors_;
  std::unique_ptr<BaguaPlan, FreeHandle> handle_;
};

class ReadyOrderScheduler {
 public:
  explicit ReadyOrderScheduler(const BucketPlan& plan) : num_tensors_(plan.num_tensors()) {
    BaguaScheduler* scheduler = nullptr;
    call_rust("ReadyOrderScheduler", bagua_scheduler_new, plan.handle(), &scheduler);
    handle_.reset(scheduler);
  }

  void begin_step() { call_rust("begin_step", bagua_scheduler_begin_step, handle_.get()); }

  std::pair<uint64_t, uint64_t> mark_ready(uint64_t tensor) {
    BaguaBucketRange range;
    call_rust("mark_ready", bagua_scheduler_mark_ready, handle_.get(), tensor, &range);
    return {range.first, range.last};
  }

  std::vector<uint64_t> missing() const {
    std::vector<uint64_t> tensors(num_tensors_);
    uint64_t num_missing = 0;
    call_rust("missing", bagua_scheduler_missing, handle_.get(), tensors.data(), tensors.size(), &num_missing);
    tensors.resize(num_missing);
    return tensors;
  }

  std::pair<uint64_t, uint64_t> finish() {
    BaguaBucketRange range;
    call_rust("finish", bagua_scheduler_finish, handle_.get(), &range);
    return {range.first, range.last};
  }

  std::vector<uint64_t> observed_order() const {
    std::vector<uint64_t> tensors(num_tensors_);
    call_rust("observed_order", bagua_scheduler_observed_order, handle_.get(), tensors.data(), tensors.size());
    return tensors;
  }

 private:
  size_t num_tensors_;
  std::unique_ptr<BaguaScheduler, FreeHandle> handle_;
};

std::string repr(const PlannedBucket& bucket) {
  return "PlannedBucket(key=" + std::to_string(bucket.key) + ", item_bytes=" + std::to_string(bucket.item_bytes) +
         ", numel=" + std::to_string(bucket.numel) + ", " + std::to_string(bucket.members.size()) + " members)";
}

constexpr const char* kBucketPlanDoc = R"(Tensors laid out in buckets: a pure function of its arguments.

numels, item_bytes and keys describe one tensor per entry (elements, bytes per element, opaque class; tensors of
different keys never share a bucket). order is a permutation of the tensor indices, expected to be ready first, first.
A bucket closes when the next tensor would take it past its cap; a larger tensor gets a bucket of its own. The cap is
what of its key lies in earlier buckets, or half of what does not, whichever is less; but at least small_bucket_bytes
and at most bucket_bytes. Tensors start at multiples of align_bytes, a power of two.

Raises InvalidArgument: order is no permutation, a limit or an item size is 0, item sizes differ within a key,
align_bytes is no power of two or no multiple of an item size, a size passes 64 bits.

>>> plan = BucketPlan([20, 10, 3, 20], [4, 4, 4, 4], [0, 0, 0, 0], [3, 2, 1, 0], 64, 256, 64)
>>> [bucket.members for bucket in plan.buckets]
[[(3, 0, 20)], [(2, 0, 3), (1, 16, 10)], [(0, 0, 20)]])";

constexpr const char* kSchedulerDoc = R"(Which buckets may be launched, in the same order on every rank.

One per wrapped model. Buckets are launched strictly in plan order, each when all its members are ready.

>>> scheduler = ReadyOrderScheduler(BucketPlan([16, 16, 16], [4, 4, 4], [0, 0, 0], [0, 1, 2], 64, 64, 64))
>>> scheduler.begin_step()
>>> scheduler.mark_ready(1), scheduler.mark_ready(0), scheduler.missing(), scheduler.finish()
((0, 0), (0, 2), [2], (2, 3)))";

void bind_plan(py::module_& m) {
  py::class_<PlannedBucket>(m, "PlannedBucket", "One bucket of a BucketPlan; numel counts padding.")
      .def_readonly("key", &PlannedBucket::key, "The key that all members share.")
      .def_readonly("item_bytes", &PlannedBucket::item_bytes, "Bytes per element.")
      .def_readonly("numel", &PlannedBucket::numel, "Elements, padding included.")
      .def_readonly("members", &PlannedBucket::members,
                    "List of (tensor index, offset in elements, elements), expected to be ready first, first.")
      .def("__repr__", &repr);

  py::class_<BucketPlan>(m, "BucketPlan", kBucketPlanDoc)
      .def(py::init<const std::vector<uint64_t>&, const std::vector<uint32_t>&, const std::vector<uint64_t>&,
                    const std::vector<uint64_t>&, uint64_t, uint64_t, uint64_t>(),
           py::arg("numels"), py::arg("item_bytes"), py::arg("keys"), py::arg("order"), py::arg("small_bucket_bytes"),
           py::arg("bucket_bytes"), py::arg("align_bytes"))
      .def_property_readonly("buckets", &BucketPlan::buckets,
                             "List of PlannedBucket in launch order; made anew by each access.");
}

void bind_scheduler(py::module_& m) {
  py::class_<ReadyOrderScheduler>(m, "ReadyOrderScheduler", kSchedulerDoc)
      .def(py::init<const BucketPlan&>(), py::arg("plan"))
      .def("begin_step", &ReadyOrderScheduler::begin_step,
           "Starts a step with no tensor ready; a step that is under way (its backward raised) is dropped.")
      .def("mark_ready", &ReadyOrderScheduler::mark_ready, py::arg("index"),
           "Marks tensor `index` ready; returns (first, last): buckets first to last - 1 are to be launched now, in "
           "this\n"
           "order. Raises InvalidArgument, leaving the step as it was: no step under way, no such tensor, or the\n"
           "tensor is already ready in this step.")
      .def("missing", &ReadyOrderScheduler::missing,
           "The tensors that are not ready, ascending; after finish, those that never became ready.")
      .def("finish", &ReadyOrderScheduler::finish,
           "Ends the step; returns (first, last), the buckets not launched yet, which count as launched. Raises\n"
           "InvalidArgument: no step under way.")
      .def("observed_order", &ReadyOrderScheduler::observed_order,
           "All tensors, in the order in which they became ready in the last complete step (all ready, or finish was\n"
           "called), those that did not in plan order behind them; before that, in plan order.");
}

}  // namespace

void bind_order(py::module_& m) {
  bind_plan(m);
  bind_scheduler(m);
}

}  // namespace bagua

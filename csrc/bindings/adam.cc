// Adam's step on raw memory; bagua/optim.py adds shapes, checks and tensors.
#include <pthread.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/collectives/arguments.h"
#include "csrc/kernels/adam.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace bagua {
namespace {

using kernels::AdamOptions;
using kernels::AdamTensor;

// To start a thread takes as long as a step of a few thousand elements.
constexpr size_t kLeastShareNumel = size_t{1} << 17;
// Shares begin at multiples of it, so that no two threads write to one cache line.
constexpr size_t kGrainNumel = 1024;

// The elements from `begin` to `end` of all, counted through.
std::vector<AdamTensor> share_of(const std::vector<AdamTensor>& tensors, size_t item, size_t begin, size_t end) {
  std::vector<AdamTensor> share;
  size_t first = 0;
  for (const AdamTensor& tensor : tensors) {
    const size_t from = std::max(begin, first) - first, to = std::min(end, first + tensor.numel);
    if (first + from < to) {
      AdamTensor part = tensor;
      for (void** array : {&part.parameter, &part.grad, &part.exp_avg, &part.exp_avg_sq}) {
        *array = static_cast<uint8_t*>(*array) + from * item;
      }
      part.numel = to - first - from;
      share.push_back(part);
    }
    first += tensor.numel;
  }
  return share;
}

void step_on_cpu(DType dtype, const std::vector<AdamTensor>& tensors, const AdamOptions& options, size_t num_threads) {
  size_t numel = 0;
  for (const AdamTensor& tensor : tensors) numel += tensor.numel;
  const size_t num_shares = std::clamp<size_t>(numel / kLeastShareNumel, 1, std::max<size_t>(num_threads, 1));
  const size_t share_numel = (numel / num_shares + kGrainNumel) / kGrainNumel * kGrainNumel;
  const auto step = [&](size_t index) {
    const std::vector<AdamTensor> share =
        share_of(tensors, item_bytes(dtype), index * share_numel, (index + 1) * share_numel);
    kernels::adam(dtype, share.data(), static_cast<int>(share.size()), options, Stream{});
  };
  std::vector<std::jthread> others;  // joined here
  for (size_t index = 1; index < num_shares; ++index) {
    others.emplace_back(step, index);
    pthread_setname_np(others.back().native_handle(), "bagua-adam");
  }
  step(0);
}

}  // namespace

void bind_adam(py::module_& m) {
  m.attr("adam_max_tensors") = kernels::kAdamMaxTensors;
  m.def(
      "adam",
      [](int dtype, const std::vector<size_t>& numels, const std::vector<uintptr_t>& parameters,
         const std::vector<uintptr_t>& grads, const std::vector<uintptr_t>& exp_avgs,
         const std::vector<uintptr_t>& exp_avg_sqs, const std::vector<std::pair<double, double>>& factors,
         const std::tuple<double, double, double, double>& options, bool is_frozen, const StreamChoice& stream,
         size_t num_threads) {
        const DType type = dtype_from(dtype);
        std::vector<AdamTensor> tensors;
        tensors.reserve(numels.size());
        for (size_t i = 0; i < numels.size(); ++i) {
          tensors.push_back({pointer(parameters.at(i)), pointer(grads.at(i)), pointer(exp_avgs.at(i)),
                             pointer(exp_avg_sqs.at(i)), numels[i], factors.at(i).first, factors.at(i).second});
          const AdamTensor& tensor = tensors.back();
          for (const void* array : {tensor.parameter, tensor.grad, tensor.exp_avg, tensor.exp_avg_sq}) {
            collectives::require_memory("adam", {"a tensor", array, tensor.numel, item_bytes(type)});
          }
        }
        const auto [beta1, beta2, eps, weight_decay] = options;
        const AdamOptions all{beta1, beta2, eps, weight_decay, is_frozen};
        py::gil_scoped_release release;
        if (stream) {
          kernels::adam(type, tensors.data(), static_cast<int>(tensors.size()), all, chosen(stream));
        } else {
          step_on_cpu(type, tensors, all, num_threads);
        }
      },
      py::arg("dtype"), py::arg("numels"), py::arg("parameters"), py::arg("grads"), py::arg("exp_avgs"),
      py::arg("exp_avg_sqs"), py::arg("factors"), py::arg("options"), py::arg("is_frozen"), py::arg("stream"),
      py::arg("num_threads"),
      "Tensors of one type by their addresses, and for each the step size and the bias correction of v. `options` are "
      "beta1, beta2, eps and weight_decay; see adam.h. On a device it is enqueued on `stream`; on the CPU "
      "`num_threads` share it.");
}

}  // namespace bagua

// The device's operators: memory and views are its own, everything else is computed by the host.
//
// An operator that the host computes waits for the current stream, reads its operands, and enqueues its results on that
// stream, late. So an operand that another stream has not written yet is read too early, and a read of the result on
// another stream without an event gets the old value. (Only a write by another stream that is too early, before an
// operator has read its operand, is not detected, because the host reads at once.) Such reads and writes are not
// counted. Copies by the user are, because they use the runtime's copies.
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

// The operators used, not ATen/ATen.h, which takes longer to compile than all of this.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"

namespace emulated {
namespace {

thread_local bool is_computing = false;

class Computing {
 public:
  Computing() { is_computing = true; }
  ~Computing() { is_computing = before_; }

 private:
  const bool before_ = is_computing;
};

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kType; }
bagua::Stream stream_of(const at::Tensor& tensor) { return native(current_stream(tensor.device().index())); }

// The whole tensor is one piece of memory that begins at data_ptr().
bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }
bool have_one_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() && is_dense(a);
}

// A CPU tensor over the device's memory. The stream must have written the memory before it is read.
at::Tensor host_view(const at::Tensor& tensor) {
  void* const address = runtime().host_address(tensor.const_data_ptr());
  return at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// A CPU tensor of the same layout, if it is dense, else contiguous, in memory that `buffer` owns.
at::Tensor empty_like_in(const at::Tensor& tensor, std::shared_ptr<void>& buffer) {
  buffer = std::shared_ptr<void>(std::malloc(tensor.nbytes()), &std::free);
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  if (is_dense(tensor)) return at::from_blob(buffer.get(), tensor.sizes(), tensor.strides(), options);
  return at::from_blob(buffer.get(), tensor.sizes(), options);
}

// Stores contiguous elements by strides (in bytes).
void scatter(char* to, const char*& from, const int64_t* sizes, const int64_t* strides, size_t dims, size_t bytes) {
  if (dims == 0) {
    std::memcpy(to, from, bytes);
    from += bytes;
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) scatter(to + i * strides[0], from, sizes + 1, strides + 1, dims - 1, bytes);
}

// Enqueues on the current stream that `to` becomes `from`, a tensor of the CPU and of the same sizes.
void write_late(const at::Tensor& to, const at::Tensor& from) {
  std::shared_ptr<void> buffer;
  empty_like_in(to, buffer).copy_(from);
  void* const address = to.data_ptr();
  const size_t bytes = to.nbytes(), item_bytes = to.element_size();
  if (is_dense(to)) {
    runtime().call(stream_of(to), "torch's operator",
                   [=] { std::memcpy(runtime().host_address(address), buffer.get(), bytes); });
    return;
  }
  const std::vector<int64_t> sizes = to.sizes().vec();
  std::vector<int64_t> strides = to.strides().vec();
  for (int64_t& stride : strides) stride *= static_cast<int64_t>(item_bytes);
  runtime().call(stream_of(to), "torch's operator", [=] {
    const char* source = static_cast<const char*>(buffer.get());
    scatter(static_cast<char*>(runtime().host_address(address)), source, sizes.data(), strides.data(), sizes.size(),
            item_bytes);
  });
}

// ---- copies -------------------------------------------------------------------------------------------------------

void wait_on_host(const bagua::Stream stream) {
  ++num_host_waits();
  runtime().synchronize(stream);
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bagua::Stream stream = stream_of(from);
  if (is_computing) {
    runtime().synchronize(stream);
    to.copy_(host_view(from));
    return;
  }
  if (!is_dense(from)) return copy_to_host(from.contiguous(), to, non_blocking);
  const size_t bytes = from.nbytes();
  if (have_one_layout(from, to) && runtime().is_pinned(to.const_data_ptr())) {
    runtime().copy_to_host(to.data_ptr(), from.const_data_ptr(), bytes, stream);
    record_use(to.storage().data_ptr(), current_stream(from.device().index()));
    if (!non_blocking) wait_on_host(stream);
    return;
  }
  const std::unique_ptr<void, void (*)(void*)> pinned(runtime().allocate_pinned(bytes),
                                                      [](void* memory) { runtime().free_pinned(memory); });
  runtime().copy_to_host(pinned.get(), from.const_data_ptr(), bytes, stream);
  wait_on_host(stream);
  to.copy_(at::from_blob(pinned.get(), from.sizes(), from.strides(), from.options().device(at::kCPU)));
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_computing) return write_late(to, from);
  if (!is_dense(to)) {
    to.copy_(at::empty(to.sizes(), to.options()).copy_(from, non_blocking));
    return;
  }
  const bagua::Stream stream = stream_of(to);
  const size_t bytes = to.nbytes();
  if (have_one_layout(from, to) && runtime().is_pinned(from.const_data_ptr())) {
    runtime().copy_from_host(to.data_ptr(), from.const_data_ptr(), bytes, stream);
    record_use(from.storage().data_ptr(), current_stream(to.device().index()));
  } else {
    void* const pinned = runtime().allocate_pinned(bytes);
    at::from_blob(pinned, to.sizes(), to.strides(), to.options().device(at::kCPU)).copy_(from);
    runtime().copy_from_host(to.data_ptr(), pinned, bytes, stream);
    runtime().call(stream, "free_pinned", [pinned] { runtime().free_pinned(pinned); });
  }
  if (!non_blocking) wait_on_host(stream);
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const char* const one = static_cast<const char*>(a.const_data_ptr());
  const char* const other = static_cast<const char*>(b.const_data_ptr());
  return one < other + b.nbytes() && other < one + a.nbytes();
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  const bagua::Stream stream = stream_of(from);
  if (from.device() != to.device()) {
    if (from.scalar_type() != to.scalar_type() || !from.is_contiguous()) {
      return copy_on_device(from.to(to.scalar_type()).contiguous(), to);
    }
    if (!to.is_contiguous()) {
      to.copy_(at::empty(to.sizes(), to.options()).copy_(from));
      return;
    }
    // The copy is on the source's stream, ordered after and before the other stream's work, as torch copies between
    // GPUs.
    wait_for(stream, stream_of(to));
    runtime().copy(to.data_ptr(), from.const_data_ptr(), to.nbytes(), stream);
    wait_for(stream_of(to), stream);
  } else if (have_one_layout(from, to) && !overlap(from, to)) {
    runtime().copy(to.data_ptr(), from.const_data_ptr(), to.nbytes(), stream);
  } else {
    runtime().synchronize(stream);
    write_late(to, host_view(from));
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const at::NoGradGuard no_grad;
  if (to.is_conj()) return copy_from(at::_conj(self), at::_conj(to), non_blocking), to;
  if (to.is_neg()) return copy_from(at::_neg_view(self), at::_neg_view(to), non_blocking), to;
  if (self.is_conj()) {
    copy_from(at::_conj(self), to, false);
    at::view_as_real(to).select(-1, 1).neg_();
    return to;
  }
  if (self.is_neg()) return copy_from(at::_neg_view(self), to, false).neg_();
  if (to.numel() == 0 && self.numel() == 0) return to;
  const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (is_ours(from) && is_ours(to)) {
    const c10::DeviceGuard guard(from.device());
    copy_on_device(from, to);
  } else {
    const c10::DeviceGuard guard(is_ours(from) ? from.device() : to.device());
    if (is_ours(from)) {
      copy_to_host(from, to, non_blocking);
    } else {
      copy_from_host(from, to, non_blocking);
    }
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return self.cpu().item(); }

// ---- memory and views ---------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device())));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device())));
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const tensor = self.unsafeGetTensorImpl();
  if (self.sizes() != size) tensor->set_sizes_contiguous(size);
  if (format.has_value()) tensor->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                        static_cast<size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  return self.set_(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) { record_use(self.storage().data_ptr(), stream); }

// ---- everything else ----------------------------------------------------------------------------------------------

// Calls `visit(tensor)` for every tensor of the arguments.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

// Operators that accept CPU tensors of any shape on a GPU, because these are indices.
bool takes_indices_of_the_cpu(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_";
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> device;
  bool has_cpus = false;  // but for single numbers
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& argument = (*stack)[i];
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!is_ours(tensor)) {
        has_cpus = has_cpus || tensor.dim() > 0;
        return;
      }
      TORCH_CHECK(!device.has_value() || *device == tensor.device(), op.schema().operator_name(),
                  ": expected all tensors to be on the same device, found ", *device, " and ", tensor.device());
      device = tensor.device();
    });
    if (argument.isGenerator()) argument = host_generator(argument.toGenerator());
  }
  TORCH_CHECK(!device.has_value() || !has_cpus || takes_indices_of_the_cpu(op), op.schema().operator_name(),
              ": expected all tensors to be on the same device, found ", *device, " and cpu");
  const c10::OptionalDeviceGuard guard(device);
  const Computing computing;
  at::native::cpu_fallback(op, stack);
}

// torch calls this for a convolution on an unknown device: the CPU's algorithm is chosen with the operands on the CPU.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  const c10::DeviceGuard guard(input.device());
  const Computing computing;
  std::optional<at::Tensor> host_bias;
  if (bias.has_value() && bias->defined()) host_bias = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad_output,
                                                                    const at::Tensor& input, const at::Tensor& weight,
                                                                    c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                                    c10::IntArrayRef dilation, bool transposed,
                                                                    c10::IntArrayRef output_padding, int64_t groups,
                                                                    std::array<bool, 3> output_mask) {
  const c10::DeviceGuard guard(input.device());
  const Computing computing;
  const int64_t bias_size = grad_output.size(1);
  const auto grads =
      at::convolution_backward(grad_output.cpu(), input.cpu(), weight.cpu(), c10::IntArrayRef(bias_size), stride,
                               padding, dilation, transposed, output_padding, groups, output_mask);
  const auto back = [&](const at::Tensor& grad) { return grad.defined() ? grad.to(input.device()) : grad; };
  return {back(std::get<0>(grads)), back(std::get<1>(grads)), back(std::get<2>(grads))};
}

// Writes the running statistics, which its schema does not declare, so the fallback would lose the writes.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const std::optional<at::Tensor>& running_mean,
                                                          const std::optional<at::Tensor>& running_var, bool training,
                                                          double momentum, double eps) {
  const c10::DeviceGuard guard(input.device());
  const Computing computing;
  const auto on_host = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional(tensor->cpu()) : std::nullopt;
  };
  const auto host_mean = on_host(running_mean), host_var = on_host(running_var);
  const auto results =
      at::native_batch_norm(input.cpu(), on_host(weight), on_host(bias), host_mean, host_var, training, momentum, eps);
  if (training && host_mean.has_value()) write_late(*running_mean, *host_mean);
  if (training && host_var.has_value()) write_late(*running_var, *host_var);
  const c10::Device device = input.device();
  return {std::get<0>(results).to(device), std::get<1>(results).to(device), std::get<2>(results).to(device)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    return at::native::set_(self, std::move(source));
  });
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("record_stream", &record_stream);
  library.impl("native_batch_norm", &batch_norm);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// torch would by default first resolve lazy tensors by another copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

}  // namespace
}  // namespace emulated

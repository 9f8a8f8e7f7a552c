// torch.autocast("emulated") by CUDA's lists of operators, as boxed kernels: torch's own macros make a function per
// operator, which doubles the time that the extension takes to build.
#include <algorithm>

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "device.h"

namespace emulated {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::AutocastPrivateUse1;

// The conversions of an operator's arguments.
enum class Policy {
  kLowerPrecision,  // all to autocast's type
  kFloat,           // all to f32
  kFloatResult,     // they stay; the result is f32 unless the caller has named another type
  kPromote,         // all to the widest of their types
};

c10::IValue cast(const c10::IValue& value, at::ScalarType type) {
  if (value.isTensor()) return at::autocast::cached_cast(type, value.toTensor(), kType);
  if (!value.isTensorList()) return value;
  return at::autocast::cached_cast(type, at::TensorList(value.toTensorVector()), kType);
}

at::ScalarType widest(c10::ArrayRef<c10::IValue> arguments) {
  at::ScalarType type = at::autocast::get_lower_precision_fp_from_device_type(kType);
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) type = at::autocast::prioritize(type, value.toTensor(), kType);
    if (value.isTensorList()) type = at::autocast::prioritize(type, value.toTensorVector(), kType);
  }
  return type;
}

template <Policy policy>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const auto& parameters = op.schema().arguments();
  const size_t first = stack->size() - parameters.size();
  if constexpr (policy == Policy::kFloatResult) {
    const bool is_eligible = (*stack)[first].isTensor() && at::autocast::is_eligible((*stack)[first].toTensor(), kType);
    for (size_t i = 0; i < parameters.size() && is_eligible; ++i) {
      if (parameters[i].name() == "dtype" && (*stack)[first + i].isNone()) {
        (*stack)[first + i] = static_cast<int64_t>(at::kFloat);
      }
    }
  } else {
    const at::ScalarType type = policy == Policy::kFloat ? at::kFloat
                                : policy == Policy::kPromote
                                    ? widest(c10::ArrayRef<c10::IValue>(*stack).slice(first))
                                    : at::autocast::get_lower_precision_fp_from_device_type(kType);
    for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = cast((*stack)[i], type);
  }
  op.callBoxed(stack);
}

// "op" and "op.overload"
#define FIRST(name, ...) #name
#define REST(name, ...) __VA_OPT__("." #__VA_ARGS__)
#define REGISTER(policy, ...) \
  library.impl(FIRST(__VA_ARGS__) REST(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast<policy>>());
#define LOWER_PRECISION(...) REGISTER(Policy::kLowerPrecision, __VA_ARGS__)
#define FP32(...) REGISTER(Policy::kFloat, __VA_ARGS__)
#define FP32_RESULT(...) REGISTER(Policy::kFloatResult, __VA_ARGS__)
#define PROMOTE(...) REGISTER(Policy::kPromote, __VA_ARGS__)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_RESULT)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace
}  // namespace emulated

"""A table of torch's operators whose rules under vmap are wrong in silence, and what client functions compute instead.

Each entry names torch's bug (of torch 2.13) and has a strict xfail in tests, which fails once torch has mended it; then
the entry goes. The norms are fused kernels in torch, whose rules take a part of the derivative for a constant; where
more than two gradients are asked for, they are torch's own references here, in elementary operators. What is rare is
refused. Other bugs of torch's operators, and attention, whose fused kernels raise where they lack a derivative, are
torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _refs as references
from torch._decomp.decompositions import native_batch_norm
from torch.autograd import forward_ad
from torch.nn import functional

from bagua.errors import InvalidArgument
from bagua.federated.verbs.reduction import widened
from bagua.federated.verbs.traced import tracing

_functorch = torch._C._functorch


def _has_tangents() -> bool:
    trace = tracing()
    return (
        forward_ad._current_level > (trace.dual_level if trace else -1) or _functorch.TransformType.Jvp in _transforms()
    )


def _transforms() -> list[Any]:
    return [level.key() for level in _functorch.get_interpreter_stack() or ()]


def _is_fused_right(*tensors: torch.Tensor | None) -> bool:
    """Returns True if a fused norm has at most two gradients, all of torch.func; in compiled code that is not known."""
    if torch.compiler.is_compiling() or _has_tangents() or _transforms().count(_functorch.TransformType.Grad) > 2:
        return False
    return not any(x is not None and _innermost(x).requires_grad for x in tensors)


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _fit(shape: Sequence[int], *tensors: torch.Tensor | None) -> bool:
    return all(x is None or tuple(x.shape) == tuple(shape) for x in tensors)


def _scaled(result: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _of_channels(
    result: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    shape = (-1, *[1] * (like.dim() - 2))
    return _scaled(result, *(x if x is None else x.reshape(shape) for x in (weight, bias))).to(like.dtype)


def _normalized(x: torch.Tensor, num_dims: int, eps: float) -> torch.Tensor:
    """Returns ``x`` with mean 0 and variance 1 over its last dimensions."""
    variance, mean = torch.var_mean(x, tuple(range(-num_dims, 0)), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    if not isinstance(normalized_shape, Sequence) or not _fit(normalized_shape, weight, bias):
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)  # which raises
    if _is_fused_right(input, weight, bias):
        result = functional.layer_norm(widened(input), list(normalized_shape), None, None, eps)
    else:
        result = _normalized(widened(input), len(normalized_shape), eps)
    return _scaled(result, weight, bias).to(input.dtype)


def _batch_norm(
    input: torch.Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> torch.Tensor:  # fmt: skip
    given = (running_mean, running_var, weight, bias)
    if input.numel() <= max(input.shape[1:2], default=0) or not _fit(input.shape[1:2], *given):
        return functional.batch_norm(input, *given, training, momentum, eps)  # which raises, of training
    if running_mean is None and _is_fused_right(input, weight, bias):
        result = functional.batch_norm(widened(input), None, None, training=training, eps=eps)
    else:
        options = (running_mean, running_var, training, momentum, eps)
        result = native_batch_norm(widened(input), None, None, *options)[0]
    return _of_channels(result, weight, bias, input)


def _instance_norm(
    input: torch.Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> torch.Tensor:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    is_fused = _is_fused_right(input, weight, bias)
    if running_mean is not None and (tracing() or not is_fused):
        raise InvalidArgument(
            "instance_norm that moves running statistics, in a graph or in more than two derivatives, where torch "
            "loses them: leave track_running_stats out"
        )
    if running_mean is not None or not _fit(input.shape[1:2], weight, bias) or input.shape[2:].numel() <= 1:
        options = (use_input_stats, momentum, eps)
        return functional.instance_norm(input, running_mean, running_var, weight, bias, *options)
    if is_fused:
        result = functional.instance_norm(widened(input), eps=eps)
    else:
        result = _normalized(widened(input), input.dim() - 2, eps)
    return _of_channels(result, weight, bias, input)


def _in_order_of_torch(norm: Callable) -> Callable:
    """Returns the norm with the arguments of torch.batch_norm and torch.instance_norm."""
    return lambda input, weight, bias, mean, var, *rest: norm(input, mean, var, weight, bias, *rest)


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    channels = input.shape[1] if input.dim() > 1 else 1
    if weight.dtype != input.dtype or weight.dim() > 1 or weight.numel() not in (1, channels):
        return functional.prelu(input, weight)  # which raises
    weight = weight.reshape(-1, *[1] * (input.dim() - 2)) if input.dim() > 1 else weight.reshape([1] * input.dim())
    return torch.where(input > 0, input, weight * input)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    if padding_idx is None or max_norm is not None or not -len(weight) <= padding_idx < len(weight):
        return functional.embedding(input, weight, padding_idx, max_norm, *rest, **options)
    is_padding = torch.arange(len(weight), device=weight.device)[:, None] == padding_idx % len(weight)
    return functional.embedding(input, torch.where(is_padding, weight.detach(), weight), None, None, *rest, **options)


def _select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    is_there = -input.dim() <= dim < input.dim() and -input.shape[dim] <= index < input.shape[dim]
    return (references if is_there else torch).select_scatter(input, src, dim, index)


def _refusing(function: Callable, name: str) -> Callable:
    """Returns the function, which torch gives no tangent of the argument of this name, without one in silence."""

    def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.get(name, args[_REFUSED[function][1]] if len(args) > _REFUSED[function][1] else None)
        if isinstance(given, torch.Tensor) and not torch.compiler.is_compiling() and _may_have_tangent(given):
            raise InvalidArgument(
                f"{function.__name__} in forward mode, where torch takes its {name} for a constant: let {name} be a "
                "tensor from around the client function, write the loss in other operators, or use torch.func.grad"
            )
        return function(*args, **kwargs)

    return checked


def _may_have_tangent(tensor: torch.Tensor) -> bool:
    if not _has_tangents() or not tensor.is_floating_point():
        return False
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


# Torch takes an argument for a constant in forward mode: its name, and its position.
_REFUSED: dict[Callable, tuple[str, int]] = {
    functional.nll_loss: ("weight", 2),
    functional.cross_entropy: ("weight", 2),
    functional.binary_cross_entropy: ("weight", 2),
    functional.soft_margin_loss: ("target", 1),
}

_SUBSTITUTES: dict[Callable, Callable] = {
    # native_layer_norm_backward under vmap takes mean and rstd for constants, and so does its forward mode.
    functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    # native_batch_norm_backward likewise; graphs lose running statistics, whose change is in no schema.
    functional.batch_norm: _batch_norm,
    torch.batch_norm: _in_order_of_torch(_batch_norm),
    functional.instance_norm: _instance_norm,
    torch.instance_norm: _in_order_of_torch(_instance_norm),
    # _prelu_kernel_backward under vmap adds up the gradients of the weights of all clients.
    functional.prelu: _prelu,
    torch.Tensor.prelu: _prelu,
    # embedding under vmap forgets padding_idx in its derivative.
    functional.embedding: _embedding,
    # index_fill of a tensor that all clients share has one client's value for all.
    torch.index_fill: references.index_fill,
    torch.Tensor.index_fill: references.index_fill,
    # roll of a number moves it to the next client.
    torch.roll: references.roll,
    torch.Tensor.roll: references.roll,
    # select_scatter_backward gives each client's source the gradients of others.
    torch.select_scatter: _select_scatter,
    torch.Tensor.select_scatter: _select_scatter,
    # .data raises under vmap, and under nested transforms it is a constant for the innermost one only.
    torch.Tensor.data.__get__: torch.Tensor.detach,
    **{function: _refusing(function, name) for function, (name, _) in _REFUSED.items()},
}


def in_clients(function: Callable) -> Callable:
    """Returns what client functions compute where they call `function` of torch."""
    return _SUBSTITUTES.get(function, function)

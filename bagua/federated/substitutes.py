"""What client functions compute instead of torch's functions that vmap makes slow, or whose derivatives are wrong.

On CPU torch computes attention by a fused kernel, which vmap calls once for each client, and which has neither tangents
nor a second derivative; what it is defined by, a softmax between two products, has all of them. The kernel stays
where sequences are long and a gradient is all that is asked for; on devices, whose kernels vmap calls once for all
clients, also where they are short. Others torch 2.13 differentiates wrongly. Of norms those are second derivatives:
under vmap the gradient of the weight is taken for a constant, as if the input did not matter to it, and in forward mode
a part of the tangent is. Group norm and RMS norm are right; torch.native_batch_norm and the like are left as they are.
Weights of losses and running statistics are constants for torch, which a tangent passes in silence: their formulas are
computed where a derivative may lead to them. Two functions mix what clients have: index_fill and roll.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from bagua.federated.reduction import HALVES, widened
from bagua.federated.traced import index_fill, slice_scatter, tracing

_fused = functional.scaled_dot_product_attention
_by_definition = torch.ops.aten._scaled_dot_product_attention_math.default
_functorch = torch._C._functorch
_MANY = 64 * 64  # scores of a head, from which on the fused kernel is faster, client by client


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention."""
    query, key, value = (_as_autocast_casts(x) for x in (query, key, value))
    is_mask = attn_mask is not None and attn_mask.dtype is torch.bool
    attn_mask = attn_mask if attn_mask is None or is_mask else _as_autocast_casts(attn_mask)
    floating = [query, key, value] if attn_mask is None or is_mask else [query, key, value, attn_mask]
    is_refused = len({x.dtype for x in floating}) > 1
    scores = query.shape[-2] * key.shape[-2]
    is_fast = scores >= _MANY or query.device.type != "cpu"
    if is_refused or (is_fast and _has_gradient_alone(query, key, value)):
        return _fused(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if is_mask:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    result, _ = _by_definition(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    return result.view(result.shape)  # torch.compile lets no one set an attribute of what came in a tuple


def _has_gradient_alone(*tensors: torch.Tensor) -> bool:
    """Whether at most one gradient, and no tangent, goes through what is computed now."""
    if _may_have_tangents() or _transforms().count(_functorch.TransformType.Grad) > 1:
        return False
    for tensor in tensors:  # autograd's may be differentiated again, later
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return False
    return True


def _may_move(tensor: torch.Tensor) -> bool:
    """Whether a gradient leads to it, or a tangent may."""
    if _may_have_tangents():
        return True
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _may_have_tangents() -> bool:
    """In what is compiled or traced nobody knows."""
    is_known = not (torch.compiler.is_compiling() or tracing())
    return not is_known or forward_ad._current_level >= 0 or _functorch.TransformType.Jvp in _transforms()


def _transforms() -> list[Any]:
    """Those of torch.func that run, by their kinds."""
    return [level.key() for level in _functorch.get_interpreter_stack() or ()]


def _calling_it(function: types.FunctionType) -> types.FunctionType:
    """A function of torch.nn.functional with `_attention` instead of the fused one, that no mode sees again."""
    names = {**vars(functional), "scaled_dot_product_attention": _attention, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _embedding(input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any):
    """The row of `padding_idx` is a constant, without tangents too: under vmap, torch gives it a gradient."""
    if padding_idx is None or not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return functional.embedding(input, weight, padding_idx, *args, **kwargs)
    rows = functional.embedding(input, weight, None, *args, **kwargs)
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, rows.detach(), rows)


def _select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """torch gives each client's `src` the gradients of others."""
    if not (-input.dim() <= dim < input.dim() and -input.shape[dim] <= index < input.shape[dim]):
        return torch.select_scatter(input, src, dim, index)  # which says so
    dim %= input.dim()
    index %= input.shape[dim]
    return torch.slice_scatter(input, src.to(input.dtype).unsqueeze(dim), dim, index, index + 1)


def _index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """torch writes all clients' values into one tensor, where that is not the client's own."""
    is_taken = isinstance(value, torch.Tensor) and not value.dim() and (input.is_complex() or not value.is_complex())
    num_dims = max(input.dim(), 1)
    if not is_taken or not -num_dims <= dim < num_dims:
        return torch.index_fill(input, dim, index, value)
    return index_fill(input, dim, index, value)


def _index_fill_in_place(input: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """torch.compile has no gradient of torch's."""
    is_number = not isinstance(value, torch.Tensor)
    return input.index_fill_(dim, index, value) if is_number else input.copy_(_index_fill(input, dim, index, value))


def _roll(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch moves each client's number on to the next client."""
    if input.dim():
        return torch.roll(input, *args, **kwargs)
    return torch.roll(input.reshape(1), *args, **kwargs).reshape(())


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In graphs of batches torch gives each client's weight the gradients of others."""
    input, weight = _as_autocast_casts(input), _as_autocast_casts(weight)
    channels = input.shape[1] if input.dim() > 1 else 1
    if weight.dtype != input.dtype or weight.dim() > 1 or weight.numel() not in (1, channels):
        return functional.prelu(input, weight)  # which says so
    weight = weight.reshape(-1, *[1] * (input.dim() - 2)) if input.dim() > 1 else weight.reshape([1] * input.dim())
    return torch.where(input > 0, input, weight * input.clamp(max=0))


def _as_autocast_casts(value: torch.Tensor) -> torch.Tensor:
    """For an operator that autocast computes in its lower precision."""
    is_cast = _is_autocast(value) and value.is_floating_point() and value.dtype is not torch.float64
    return value.to(torch.get_autocast_dtype(value.device.type)) if is_cast else value


def _as_autocast_widens(value: torch.Tensor) -> torch.Tensor:
    """For an operator that autocast computes in float32."""
    return widened(value) if _is_autocast(value) else value


def _is_autocast(value: torch.Tensor) -> bool:
    kind = value.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


# ---- losses

_REDUCTIONS = ("none", "mean", "sum")


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """torch.nn.functional.nll_loss."""
    reduction = _reduction_of(size_average, reduce, reduction)
    if not _are_weighted(input, target, weight, reduction):
        return functional.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    losses = functional.nll_loss(input, target, ignore_index=ignore_index, reduction="none")
    weights = _weights_of(target, weight, ignore_index)
    return _reduced(losses * weights, weights, reduction)


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy. Where targets are probabilities, torch's is right."""
    reduction = _reduction_of(size_average, reduce, reduction)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if not _are_weighted(input, target, weight, reduction) or not 0 <= label_smoothing <= 1:
        return functional.cross_entropy(input, target, weight, reduction=reduction, **options)
    dim = min(1, input.dim() - 1)
    logs = functional.log_softmax(input, dim)
    losses = functional.nll_loss(logs, target, ignore_index=ignore_index, reduction="none")
    weights = _weights_of(target, weight, ignore_index)
    losses = losses * weights
    if label_smoothing:
        of_all = (logs.movedim(dim, -1) * weight).mean(-1).masked_fill(target == ignore_index, 0)
        losses = (1 - label_smoothing) * losses - label_smoothing * of_all
    return _reduced(losses, weights, reduction)


def _are_weighted(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str) -> bool:
    """Whether a derivative may lead to weights of classes that torch takes; it says what they are else."""
    if weight is None or target.is_floating_point() or reduction not in _REDUCTIONS or not input.dim():
        return False
    return weight.shape == input.shape[:2][-1:] and _may_move(weight)


def _weights_of(target: torch.Tensor, weight: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Of the targets' classes, 0 where a target does not count."""
    is_ignored = target == ignore_index
    classes = target.masked_fill(is_ignored, 0).long()
    weights = weight.gather(0, classes.reshape(-1)).reshape(target.shape)
    return weights.masked_fill(is_ignored, 0)


def _reduced(losses: torch.Tensor, weights: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def _binary_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """torch.nn.functional.binary_cross_entropy."""
    reduction = _reduction_of(size_average, reduce, reduction)
    if weight is None or reduction not in _REDUCTIONS or not _may_move(weight):
        return functional.binary_cross_entropy(input, target, weight, reduction=reduction)
    losses = functional.binary_cross_entropy(input, target, reduction="none")
    losses = (losses * weight.expand(losses.shape)).to(losses.dtype)
    return _reduced(losses, torch.ones_like(losses), reduction)


def _soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """torch.nn.functional.soft_margin_loss."""
    reduction = _reduction_of(size_average, reduce, reduction)
    if input.shape != target.shape or reduction not in _REDUCTIONS or not _may_move(target):
        return functional.soft_margin_loss(input, target, reduction=reduction)
    losses = torch.log1p(torch.exp(-(_as_autocast_widens(target) * _as_autocast_widens(input))))
    return _reduced(losses, torch.ones_like(losses), reduction)


def _reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    return functional._Reduction.legacy_get_string(size_average, reduce)


# ---- norms


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # of torch.layer_norm, which does nothing
) -> torch.Tensor:
    """torch.nn.functional.layer_norm, and torch.layer_norm."""
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (list, tuple)) else ()
    is_taken = shape and all(shape) and input.shape[-len(shape) :] == shape and _fit(input, shape, weight, bias)
    is_torchs = not is_taken or _has_gradient_alone(*_given(input, weight, bias))
    if is_torchs:
        result = functional.layer_norm(input, normalized_shape, weight, bias, eps)
    elif _may_have_tangents():
        result = _standardized(widened(input), range(-len(shape), 0), eps)
    else:
        result = functional.layer_norm(widened(input), shape, None, None, eps)
    result = result if is_torchs else _scaled(result, weight, bias)
    # What torch gives without vmap, whose rule gives float32 where weights are of it.
    is_widened = input.is_cuda and torch.is_autocast_enabled("cuda")
    return result.to(torch.promote_types(input.dtype, torch.float32) if is_widened else input.dtype)


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """torch.nn.functional.batch_norm."""
    norm = functools.partial(functional.batch_norm, training=training, momentum=momentum, eps=eps)
    return _norm_of_channels(norm, 0, training, momentum, eps, input, running_mean, running_var, weight, bias)


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """torch.nn.functional.instance_norm."""
    norm = functools.partial(functional.instance_norm, use_input_stats=use_input_stats, momentum=momentum, eps=eps)
    return _norm_of_channels(norm, 2, use_input_stats, momentum, eps, input, running_mean, running_var, weight, bias)


def _of_torch_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """torch.batch_norm."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _of_torch_instance_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """torch.instance_norm."""
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _norm_of_channels(
    norm: Callable[..., torch.Tensor],
    first: int,
    is_of_input: bool,
    momentum: float,
    eps: float,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A norm of torch's, with its options, of ``[N, C, ...]``.

    Args:
        first: of the axes over which its statistics are taken, but for that of channels.
        is_of_input: whether these are the input's, not the running ones.
    """
    are_taken = (
        input.dim() >= 2
        and _fit(input, input.shape[1:2], weight, bias)
        and _fit(input, input.shape[1:2], running_mean, running_var)
        and (running_mean is None) == (running_var is None)
        and (is_of_input or running_mean is not None)
    )
    dims = [dim for dim in range(first, input.dim()) if dim != 1]
    have_many = all(input.shape) and (not is_of_input or any(input.shape[dim] > 1 for dim in dims))
    given = _given(input, running_mean, running_var, weight, bias)
    are_followed = not is_of_input and any(_may_move(x) for x in _given(running_mean, running_var))
    if not (are_taken and have_many) or (not are_followed and _has_gradient_alone(*given)):
        return norm(input, running_mean, running_var, weight, bias).to(input.dtype)
    wide = widened(input)
    if not are_followed and not _may_have_tangents():
        are_halves = any(x.dtype in HALVES for x in _given(running_mean, running_var))
        result = norm(input if are_halves else wide, running_mean, running_var)
    elif is_of_input:
        result = _standardized(wide, dims, eps)
        # Not by torch's norm: what it does to them graphs would lose.
        mean = wide.detach().mean(dims)
        number = wide.numel() // mean.numel()
        var = (wide.detach() - wide.detach().mean(dims, keepdim=True)).square().sum(dims) / max(number - 1, 1)
        for running, now in ((running_mean, mean), (running_var, var)):
            if running is not None:
                now = now.mean(0) if now.dim() > 1 else now
                running.copy_((1 - momentum) * running + momentum * now)
    else:
        mean, var = (_along_channels(x, wide) for x in (running_mean, running_var))
        result = (wide - mean) * torch.rsqrt(var + eps)
    weight, bias = (None if x is None else _along_channels(x, input) for x in (weight, bias))
    return _scaled(result, weight, bias).to(input.dtype)


def _fit(input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether they are what torch takes; it says what they are else."""
    dtypes = (input.dtype, torch.float32) if input.dtype in HALVES else (input.dtype,)
    return all(tuple(x.shape) == tuple(shape) and x.dtype in dtypes for x in _given(weight, bias))


def _given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _along_channels(vector: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return vector.reshape(-1, *[1] * (input.dim() - 2))


def _standardized(input: torch.Tensor, dims: Iterable[int], eps: float) -> torch.Tensor:
    dims = tuple(dims)
    centered = input - input.mean(dims, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)


def _scaled(result: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


_SUBSTITUTES: dict[Callable, Callable] = {
    _fused: _attention,
    functional.multi_head_attention_forward: _calling_it(functional.multi_head_attention_forward),
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    torch.batch_norm: _of_torch_batch_norm,
    torch.instance_norm: _of_torch_instance_norm,
    functional.prelu: _prelu,
    torch.Tensor.prelu: _prelu,
    functional.nll_loss: _nll_loss,
    functional.cross_entropy: _cross_entropy,
    functional.binary_cross_entropy: _binary_cross_entropy,
    functional.soft_margin_loss: _soft_margin_loss,
    torch.index_fill: _index_fill,
    torch.Tensor.index_fill: _index_fill,
    torch.Tensor.index_fill_: _index_fill_in_place,
    torch.roll: _roll,
    torch.Tensor.roll: _roll,
    torch.slice_scatter: slice_scatter,
    torch.Tensor.slice_scatter: slice_scatter,
    torch.select_scatter: _select_scatter,
    torch.Tensor.select_scatter: _select_scatter,
}


def in_clients(function: Callable) -> Callable:
    """What client functions compute where they call `function` of torch."""
    return _SUBSTITUTES.get(function, function)

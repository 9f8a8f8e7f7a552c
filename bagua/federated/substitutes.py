"""What client functions compute instead of torch's functions that vmap makes slow, or whose derivatives are wrong.

On CPU torch computes attention by a fused kernel, which vmap calls once for each client, and which has neither tangents
nor a second derivative; what it is defined by, a softmax between two products, has all of them. The kernel stays
where sequences are long and a gradient is all that is asked for; on devices, whose kernels vmap calls once for all
clients, also where they are short. Two functions torch 2.13 differentiates wrongly under vmap.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from bagua.federated.traced import tracing

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
    is_mask = attn_mask is not None and attn_mask.dtype is torch.bool
    is_refused = attn_mask is not None and not is_mask and attn_mask.dtype != query.dtype
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
    if torch.compiler.is_compiling() or tracing() or forward_ad._current_level >= 0:
        return False
    kinds = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    if _functorch.TransformType.Jvp in kinds or kinds.count(_functorch.TransformType.Grad) > 1:
        return False
    for tensor in tensors:  # autograd's may be differentiated again, later
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return False
    return True


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
    return torch.slice_scatter(input, src.unsqueeze(dim), dim, index, index + 1)


_SUBSTITUTES: dict[Callable, Callable] = {
    _fused: _attention,
    functional.multi_head_attention_forward: _calling_it(functional.multi_head_attention_forward),
    functional.embedding: _embedding,
    torch.select_scatter: _select_scatter,
    torch.Tensor.select_scatter: _select_scatter,
}


def in_clients(function: Callable) -> Callable:
    """What client functions compute where they call `function` of torch."""
    return _SUBSTITUTES.get(function, function)

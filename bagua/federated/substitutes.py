"""What client functions compute in the place of torch's functions that vmap makes slow, or whose derivatives are wrong.

On CPU torch computes attention by a fused kernel, which vmap would call once for each client, and which has neither
tangents nor a second derivative; what it is defined by, a softmax between two products, has all of them. Two functions
torch 2.13 differentiates wrongly under vmap.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_fused = functional.scaled_dot_product_attention
_by_definition = torch.ops.aten._scaled_dot_product_attention_math.default


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
    if query.device.type != "cpu":
        return _fused(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    result, _ = _by_definition(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    return result.view(result.shape)  # torch.compile lets no one mark what came in a tuple


def _calling_it(function: types.FunctionType) -> types.FunctionType:
    """A function of torch.nn.functional with `_attention` in the place of the fused one, that no mode sees again."""
    names = {**vars(functional), "scaled_dot_product_attention": _attention, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _embedding(input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any):
    """The row of `padding_idx` is a constant: under vmap, torch gives it a gradient."""
    rows = functional.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return rows
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, rows.detach(), rows)


def _select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """torch gives each client's `src` the gradients of others."""
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

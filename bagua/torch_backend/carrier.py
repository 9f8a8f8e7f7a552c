"""Tensors as the collectives of bagua take them: types that only move, and lists of tensors.

A type that the core does not reduce is moved as one of the same size that it knows, the carrier: a view, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..errors import InvalidArgument
from ..reduction import is_known

__all__ = ["as_carrier", "concatenate", "copy_out", "one"]

_CARRIERS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory in a type that the core can move; complex128 gets one dimension more.

    Raises:
        InvalidArgument: the tensor is a lazy conjugate or negative, whose memory holds other values.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(
            "the tensor is a lazy view (x.conj(), or x.conj().imag); call .resolve_conj().resolve_neg() on it first"
        )
    if is_known(tensor.dtype) or tensor.layout != torch.strided:  # the group refuses other layouts
        return tensor
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor.detach())
    return tensor.detach().view(_CARRIERS[tensor.element_size()])


def one(items: Sequence, name: str):
    """The only element of torch's lists, which date from several devices per process.

    Raises:
        InvalidArgument: there are more or fewer.
    """
    if isinstance(items, torch.Tensor) or len(items) != 1:
        given = "a tensor" if isinstance(items, torch.Tensor) else f"{len(items)} elements"
        raise InvalidArgument(f"{name} is {given}; give a list of one, since a process has one device")
    return items[0]


def concatenate(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements, one tensor after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_out(source: torch.Tensor, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
    """What fills `parts`, one after the other, from the elements of `source`; called when these have arrived."""

    def copy() -> None:
        carriers = [as_carrier(part) for part in parts]
        pieces = source.split([carrier.numel() for carrier in carriers])
        for carrier, piece in zip(carriers, pieces, strict=True):
            carrier.detach().copy_(piece.view(carrier.shape))

    return copy

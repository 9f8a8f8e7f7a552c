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
        InvalidArgument: the tensor is a lazy conjugate, whose memory holds other values.
    """
    if is_known(tensor.dtype) or tensor.layout != torch.strided:  # the group refuses other layouts
        return tensor
    if tensor.is_conj():
        raise InvalidArgument("the tensor is a lazy conjugate (x.conj()); call .resolve_conj() on it first")
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
    """All elements, one tensor after the other.

    Raises:
        InvalidArgument: the tensors are of different types.
    """
    tensors = list(tensors)
    _check_one_type(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_out(source: torch.Tensor, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
    """What fills `parts`, one after the other, from the elements of `source`; called when these have arrived.

    Raises:
        InvalidArgument: the parts are of different types.
    """
    carriers = [as_carrier(part).detach() for part in parts]
    _check_one_type([source, *carriers])

    def copy() -> None:
        pieces = source.split([carrier.numel() for carrier in carriers])
        for carrier, piece in zip(carriers, pieces, strict=True):
            carrier.copy_(piece.view(carrier.shape))

    return copy


def _check_one_type(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise InvalidArgument(f"the list has tensors of {tensors[0].dtype} and {tensor.dtype}; give them one type")

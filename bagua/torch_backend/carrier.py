"""Tensors as the collectives of bagua take them: types that only move, and lists of tensors.

A type that the core does not reduce is moved as one of the same size that it knows, the carrier: a view, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..distributed.dtypes import address_of, is_known
from ..distributed.memory_overlap import first_to_share, shares_with_itself
from ..errors import InvalidArgument

__all__ = ["as_carrier", "check_apart", "concatenate", "copy_out", "one"]

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


def one(items: Sequence[Any], name: str) -> Any:
    """The only element of torch's lists, which date from several devices per process.

    Raises:
        InvalidArgument: there are more or fewer.
    """
    if isinstance(items, torch.Tensor) or len(items) != 1:
        given = "a tensor" if isinstance(items, torch.Tensor) else f"{len(items)} elements"
        raise InvalidArgument(f"{name} is {given}; give a list of one, since a process has one device")
    return items[0]


def check_apart(
    written: Sequence[Sequence[torch.Tensor]], read: Sequence[torch.Tensor] = (), name: str = "tensors"
) -> None:
    """Of operations that may run in any order, what each writes and what each reads, before one of them is started.

    Raises:
        InvalidArgument: two results are to be in one place, or one where another operation reads; or there is no
            memory for one.
    """
    results = [(operation, tensor) for operation, tensors in enumerate(written) for tensor in tensors]
    read = read if len(written) > 1 else ()  # one operation copies its list after it has read
    if len(results) == 1:
        return  # the collective itself checks one output and one input
    tensors = [*results, *enumerate(read)]
    if not all(tensor.is_cpu and tensor.layout is torch.strided for _, tensor in tensors):
        return  # refused by what moves them
    for _, tensor in tensors:
        address_of(tensor, f"one of {name}")
    for _, tensor in results:
        if not tensor.is_contiguous() and shares_with_itself(tensor.shape, tensor.stride()):
            raise InvalidArgument(
                f"one of {name}, of shape {tuple(tensor.shape)} and strides {tensor.stride()}, overlaps itself, and "
                "the result has no room there; pass a copy (.clone())"
            )
    pair = first_to_share(results, list(enumerate(read)))
    if pair is not None:
        raise InvalidArgument(
            f"{name} has tensors that share memory, where a result is to be written: one of shape "
            f"{tuple(tensors[pair[0]][1].shape)} with one of shape {tuple(tensors[pair[1]][1].shape)}; give each a "
            "tensor of its own"
        )


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

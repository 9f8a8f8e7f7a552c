"""torch's tensors and lists of tensors in the form that bagua's collectives take.

A type that the core cannot reduce is moved as a wire dtype, one of the same size that it knows: a view, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..distributed.arguments import is_reducible
from ..distributed.devices import check_supported, common_device, keep_for_current_stream
from ..distributed.memory_overlap import first_to_share, shares_with_itself
from ..distributed.tensors import address_of
from ..errors import InvalidArgument

__all__ = ["as_real", "as_wire_dtype", "check_disjoint", "concatenate", "copy_out", "only_element"]

_WIRE_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def as_wire_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory in a type that the core can move; complex128 gets one dimension more.

    Raises:
        InvalidArgument: the tensor is a lazy conjugate, whose memory holds other values.
    """
    if is_reducible(tensor.dtype) or tensor.layout != torch.strided:  # ProcessGroup refuses other layouts
        return tensor
    _check_no_conjugate(tensor)
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor.detach())
    return tensor.detach().view(_WIRE_DTYPES[tensor.element_size()])


def as_real(tensor: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
    """Returns a view of a complex tensor's real and imaginary parts, and any other tensor unchanged, for reducing.

    Raises:
        InvalidArgument: `op` cannot be applied to the parts, or the tensor is a lazy conjugate, or sparse.
    """
    if tensor.layout != torch.strided:
        raise InvalidArgument(
            f"a tensor that is to be reduced has layout {tensor.layout}; convert it with .to_dense() first, and if it "
            "is a gradient that DDP reduces, construct its module (nn.Embedding, nn.EmbeddingBag) with sparse=False"
        )
    if not tensor.is_complex():
        return tensor
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidArgument(f"{op.name} has no meaning for {tensor.dtype}; use SUM or AVG")
    _check_no_conjugate(tensor)
    return torch.view_as_real(tensor.detach())


def _check_no_conjugate(tensor: torch.Tensor) -> None:
    if tensor.is_conj():
        raise InvalidArgument("the tensor is a lazy conjugate (x.conj()); call .resolve_conj() on it first")


def only_element(items: Sequence[Any], name: str) -> Any:
    """Returns the only element of one of torch's lists, which have one per device of the process.

    Raises:
        InvalidArgument: there are more or fewer.
    """
    if isinstance(items, torch.Tensor) or len(items) != 1:
        given = "a tensor" if isinstance(items, torch.Tensor) else f"{len(items)} elements"
        raise InvalidArgument(f"{name} is {given}; give a list of one, since a process has one device")
    return items[0]


def check_disjoint(
    written: Sequence[Sequence[torch.Tensor]], read: Sequence[torch.Tensor] = (), name: str = "tensors"
) -> None:
    """Checks operations that may run in any order, before one of them is started.

    Args:
        written: the tensors that each operation writes.
        read: the tensor that each operation reads.
        name: the list's name in error messages.

    Raises:
        InvalidArgument: two results share memory, or a result shares memory with the input of another operation, or a
            tensor has no memory, or they are on several devices.
    """
    results = [(operation, tensor) for operation, tensors in enumerate(written) for tensor in tensors]
    read = read if len(written) > 1 else ()  # a single operation copies its list after it has read
    if len(results) == 1:
        return  # the collective itself checks one output and one input
    tensors = [*results, *enumerate(read)]
    if not all(tensor.layout is torch.strided for _, tensor in tensors):
        return  # ProcessGroup refuses them
    for _, tensor in tensors:
        if not tensor.is_cpu:
            check_supported(tensor.device, f"one of {name}")
        address_of(tensor, f"one of {name}")
    for _, tensor in results:
        if not tensor.is_contiguous() and shares_with_itself(tensor.shape, tensor.stride()):
            raise InvalidArgument(
                f"one of {name}, of shape {tuple(tensor.shape)} and strides {tensor.stride()}, overlaps itself, and "
                "it cannot hold the result; pass a copy (.clone())"
            )
    common_device((f"one of {name}", tensor) for _, tensor in tensors)
    pair = first_to_share(results, list(enumerate(read)))
    if pair is not None:
        raise InvalidArgument(
            f"{name} has tensors that share memory, to which a result is to be written: one of shape "
            f"{tuple(tensors[pair[0]][1].shape)} with one of shape {tuple(tensors[pair[1]][1].shape)}; give each a "
            "tensor of its own"
        )


def concatenate(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenates the elements of all tensors.

    Raises:
        InvalidArgument: the tensors are of different types, or on different devices.
    """
    tensors = list(tensors)
    _check_alike(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def copy_out(source: torch.Tensor, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Returns a function that fills `parts` in order with the elements of `source`, to be called when these are there.

    Raises:
        InvalidArgument: the parts are of different types, or on different devices.
    """
    views = [as_wire_dtype(part).detach() for part in parts]
    _check_alike([source, *views])

    def copy() -> None:
        for tensor in () if source.is_cpu else (source, *views):
            keep_for_current_stream(tensor)  # it may have been allocated on another stream
        pieces = source.split([view.numel() for view in views])
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece.view(view.shape))

    return copy


def _check_alike(tensors: Sequence[torch.Tensor]) -> None:
    common_device(("one tensor of the list", tensor) for tensor in tensors)
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise InvalidArgument(f"the list has tensors of {tensors[0].dtype} and {tensor.dtype}; give them one type")

"""What collectives accept: torch tensors and NumPy arrays, checked and made ready for the core.

Data path: communication -> group -> **here** -> core. Invariant: the core gets contiguous CPU memory of a type that it
knows; whatever else a caller brings is copied, and copied back when the operation has ended, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bagua.distributed.dtypes import address_of, dtype_code
from bagua.distributed.memory_overlap import shares_with_itself
from bagua.errors import InvalidArgument

__all__ = ["Array", "Prepared", "address_of", "check_pair", "places_of", "prepare", "split_numels"]

Array = torch.Tensor | np.ndarray


class Prepared(NamedTuple):
    """A caller's tensor as the core sees it."""

    data: torch.Tensor  # contiguous, on the CPU
    give_back: Callable[[], None] | None  # puts the result where the caller looks for it; None: it is there already


def prepare(tensor: Array, what: str, *, is_written: bool = True) -> Prepared:
    """The memory of `tensor`, or of a contiguous copy of it.

    Args:
        tensor: any shape and strides, 0-dim and empty ones too.
        what: its name in error messages.
        is_written: whether the operation writes to it; a read-only array, or elements that share memory, will not do
            then.

    Raises:
        InvalidArgument: no tensor, not on the CPU, without memory, sparse, read-only, overlapping itself, or of a type
            that the core does not know.
    """
    if isinstance(tensor, np.ndarray):
        return _prepare_array(tensor, what, is_written)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{what} is a {type(tensor).__name__}; give a torch.Tensor or a numpy.ndarray")
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what} is on {tensor.device}; this release communicates CPU tensors")
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{what} has layout {tensor.layout}; convert it with .to_dense() first")
    dtype_code(tensor.dtype)
    address = address_of(tensor, what)  # what has none may not know the operations that follow either
    if is_written and not tensor.is_contiguous():
        _check_overlap(tensor.shape, tensor.stride(), 1, what)
    detached = tensor.detach()
    data = detached.resolve_neg().contiguous()  # a lazy negative's memory holds other values
    if not is_written or data.data_ptr() == address:
        return Prepared(data, None)
    return Prepared(data, _copy_back(what, lambda: detached.copy_(data)))


def _prepare_array(array: np.ndarray, what: str, is_written: bool) -> Prepared:
    if is_written and not array.flags.writeable:
        raise InvalidArgument(f"{what} is a read-only array, but the result is written to it; pass a copy")
    if is_written:
        _check_overlap(array.shape, array.strides, array.itemsize, what)
    is_plain = array.flags.c_contiguous and array.flags.writeable  # torch takes no negative strides, warns of read-only
    try:
        data = torch.from_numpy(array if is_plain else array.copy(order="C"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} is an array of {array.dtype}, which cannot be sent: {error}") from None
    dtype_code(data.dtype)
    if not is_written or data.data_ptr() == array.ctypes.data:
        return Prepared(data, None)
    return Prepared(data, _copy_back(what, lambda: np.copyto(array, data.numpy())))


def _copy_back(what: str, copy: Callable[[], object]) -> Callable[[], None]:
    def give_back() -> None:
        try:
            copy()
        except (RuntimeError, ValueError) as error:
            raise InvalidArgument(
                f"the operation has ended, but its result cannot be written to {what}: {error}; pass a copy, or leave "
                "it as it is until wait() has returned"
            ) from error

    return give_back


def _check_overlap(shape: Sequence[int], strides: Sequence[int], item: int, what: str) -> None:
    """Raises InvalidArgument where elements share memory; `item` is the size of one in units of the strides."""
    if not shares_with_itself(shape, strides, item):
        return
    if any(stride == 0 and length > 1 for length, stride in zip(shape, strides, strict=True)):
        raise InvalidArgument(
            f"{what} of shape {tuple(shape)} is expanded: several of its elements are one place in memory, and the "
            "result has no room there; pass a copy (.clone(), numpy.array)"
        )
    raise InvalidArgument(
        f"{what} of shape {tuple(shape)} and strides {tuple(strides)} overlaps itself: several of its elements "
        "share memory, and the result has no room there; pass a copy (.clone(), numpy.array)"
    )


def check_pair(
    first: torch.Tensor, second: torch.Tensor, have: int, want: int, name: str, other: str, size: int
) -> None:
    """Raises InvalidArgument unless input and output have one type and their sizes fit."""
    if first.dtype != second.dtype:
        raise InvalidArgument(f"input is {first.dtype} but output is {second.dtype}; give them one type")
    if have != want:
        raise InvalidArgument(f"{name} has {have} elements, but {other} has {want} (group size {size})")


def split_numels(tensor: torch.Tensor, splits: Sequence[int] | None, name: str, size: int) -> list[int]:
    """Elements per rank, of splits that count rows of dimension 0; None: equal ones. Raises InvalidArgument."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if rows % size:
            raise InvalidArgument(f"{name} has {rows} rows, not a multiple of {size}; give {name}_splits")
        splits = [rows // size] * size
    splits = [int(split) for split in splits]
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise InvalidArgument(f"{name}_splits {splits} must be {size} non-negative numbers that add up to {rows}")
    row_numel = tensor.numel() // rows if rows else 0
    return [split * row_numel for split in splits]


def places_of(parts: Sequence[tuple[int, torch.Tensor]] | None, data: torch.Tensor) -> list[tuple[int, int, int]]:
    """First element, number of elements and address of each part, for the core.

    Args:
        parts: (first element in ``data``, tensor), ascending and apart; between them are zeros. A tensor is dense: its
            elements lie in memory as they are to lie in ``data``. None is no parts: the values are those of ``data``.

    Raises:
        InvalidArgument: they do not fit ``data``.
    """
    dtype, limit, end = data.dtype, data.numel(), 0
    places = []
    for begin, part in parts or ():
        numel = part.numel()
        if part.dtype is not dtype or begin < end or begin + numel > limit:
            raise InvalidArgument(
                f"a part of {numel} {part.dtype} elements is to lie from element {begin} on, behind one that "
                f"ends at {end}, in a tensor of {limit} {dtype}; parts are ascending, apart, and inside"
            )
        end = begin + numel
        places.append((begin, numel, address_of(part, "a part")))
    return places

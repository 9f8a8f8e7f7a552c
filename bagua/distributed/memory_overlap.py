"""Which elements share memory: of one tensor, and of several. Exact, whatever the strides.

Beside the data path: tensors.py and the lists of torch_backend ask before anything is sent. Two elements share memory
where they have a byte in common, so an element is one dimension more, of bytes. Places are enumerated only where
dimensions interleave and the memory has room for all of them, and then without the longest dimension; of two tensors
that interleave, without what lies in one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["first_to_share", "shares_with_itself"]

Dim = tuple[int, int]  # stride and length, in units of one and the same size


def shares_with_itself(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Whether two elements share memory.

    Args:
        item: the size of an element in units of the strides.
    """
    dims = [(abs(stride), length) for length, stride in zip(shape, strides, strict=True) if length != 1]
    return _meet(dims if item == 1 else [*dims, (1, item)])


def first_to_share(
    written: Sequence[tuple[int, torch.Tensor]], read: Sequence[tuple[int, torch.Tensor]] = ()
) -> tuple[int, int] | None:
    """Two strided CPU tensors that share memory although one of them is written; None where there are none.

    Args:
        written, read: of several operations, which may run in any order: the number of its operation, and a tensor. A
            tensor may share memory with itself, and with what its own operation reads.

    Returns:
        Their indices in ``[*written, *read]``.
    """
    tensors = [*written, *read]
    spans = sorted((*_span(tensor), index) for index, (_, tensor) in enumerate(tensors) if tensor.numel())
    if all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans)):
        return None
    first = tensors[0][1]
    is_uniform = not read and all(_are_alike(tensor, first) for _, tensor in tensors)  # such as a matrix's columns
    if is_uniform and not _meet(_dims(first), [begin for begin, _, _ in spans]):
        return None
    for place, (_, end, index) in enumerate(spans):
        for begin, _, other in itertools.islice(spans, place + 1, None):
            if begin >= end:
                break
            low, high = min(index, other), max(index, other)
            is_allowed = low >= len(written) or (high >= len(written) and tensors[low][0] == tensors[high][0])
            if not is_allowed and _share(tensors[low][1], tensors[high][1]):
                return low, high
    return None


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, begin + sum(stride * (length - 1) for stride, length in _dims(tensor)) + 1


def _dims(tensor: torch.Tensor) -> list[Dim]:
    item = tensor.element_size()
    return [*((item * stride, length) for length, stride in zip(tensor.shape, tensor.stride(), strict=True)), (1, item)]


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_contiguous() and b.is_contiguous():
        return True  # their spans overlap
    dims, begins = _dims(a), [a.data_ptr(), b.data_ptr()]
    if _are_alike(a, b) and not _meet(dims):
        return _meet(dims, begins)
    (begins_a, length_a), (begins_b, length_b) = _runs(a), _runs(b)
    # Of b's runs, all equally long, the last one that begins before a run of a ends is the one that reaches furthest.
    last = np.searchsorted(begins_b, begins_a + length_a) - 1
    return bool(((last >= 0) & (begins_b[last] + length_b > begins_a)).any())


def _runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Where its runs of adjacent bytes begin, ascending, and the length of each."""
    dims = _merged(sorted((stride, length) for stride, length in _dims(tensor) if stride and length > 1))
    run = dims.pop(0)[1] if dims and dims[0][0] == 1 else 1
    places = tensor.data_ptr() + _places(dims)
    places.sort()
    return places, run


def _meet(dims: Sequence[Dim], begins: Sequence[int] = (0,)) -> bool:
    """Whether two different ways to count the dimensions off, from `begins` on, lead to one place."""
    if any(length == 0 for _, length in dims):
        return False
    dims = sorted((stride, length) for stride, length in dims if length > 1)
    if dims and dims[0][0] == 0:
        return True
    if len(begins) == 1:
        reach, core = 0, 0  # of the dimensions so far; how many of them interleave
        for count, (stride, length) in enumerate(dims, 1):
            if stride <= reach:
                core = count
            reach += stride * (length - 1)
        dims = dims[:core]  # the others step over all that comes before them
        if not dims:
            return False
    numel = len(begins)
    for _, length in dims:
        numel *= length
    if numel > max(begins) - min(begins) + sum(stride * (length - 1) for stride, length in dims) + 1:
        return True  # more than there are places
    dims = _merged(dims) or [(1, 1)]
    longest = max(range(len(dims)), key=lambda index: dims[index][1])
    stride, length = dims.pop(longest)
    places = (np.asarray(begins)[:, None] - min(begins) + _places(dims)).reshape(-1)
    # Along the longest dimension two places meet where they are a multiple of its stride apart, and few enough of them.
    steps = places // stride
    keys = places % stride * (int(steps.max()) + length + 1) + steps
    keys.sort()
    return keys.size > 1 and int(np.diff(keys).min()) < length


def _merged(dims: Sequence[Dim]) -> list[Dim]:
    """The same places in fewer dimensions: one that goes on where another ends is a part of it."""
    merged: list[Dim] = []
    for stride, length in dims:
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * length
        else:
            merged.append((stride, length))
    return merged


def _places(dims: Sequence[Dim]) -> np.ndarray:
    places = np.zeros(1, dtype=np.int64)
    for stride, length in dims:
        places = np.add.outer(places, stride * np.arange(length)).reshape(-1)
    return places

"""The check whether elements of one tensor, or of several, share memory. Exact, whatever the strides.

Beside the data path: tensors.py, torch_backend and torch_api check before anything is sent. Two elements share memory
if they have a byte in common, so the bytes of an element count as one more dimension. Offsets are enumerated only where
dimensions interleave and the memory is large enough for all of them to differ, and then without the longest dimension;
of two tensors that interleave, without their contiguous runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["first_to_share", "shares_with_itself"]

Dim = tuple[int, int]  # stride and length, in units of one and the same size


def shares_with_itself(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Returns True if two elements share memory.

    Args:
        item: the size of an element in units of the strides.
    """
    dims = [(abs(stride), length) for length, stride in zip(shape, strides, strict=True) if length != 1]
    return _collide(dims if item == 1 else [*dims, (1, item)])


def first_to_share(
    written: Sequence[tuple[int, torch.Tensor]], read: Sequence[tuple[int, torch.Tensor]] = ()
) -> tuple[int, int] | None:
    """Two strided CPU tensors that share memory although one of them is written; None where there are none.

    Args:
        written, read: pairs (number of the operation, tensor) of several operations, which may run in any order. A
            tensor may share memory with itself, and with what its own operation reads.

    Returns:
        The indices of the two in ``[*written, *read]``.
    """
    tensors = [*written, *read]
    spans = sorted((*_span(tensor), index) for index, (_, tensor) in enumerate(tensors) if tensor.numel())
    if all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans)):
        return None
    first = tensors[0][1]
    is_uniform = not read and all(_have_same_layout(tensor, first) for _, tensor in tensors)  # as columns have
    if is_uniform and not _collide(_dims(first), [begin for begin, _, _ in spans]):
        return None
    for position, (_, end, index) in enumerate(spans):
        for begin, _, other in itertools.islice(spans, position + 1, None):
            if begin >= end:
                break
            low, high = min(index, other), max(index, other)
            is_allowed = low >= len(written) or (high >= len(written) and tensors[low][0] == tensors[high][0])
            if not is_allowed and _share_memory(tensors[low][1], tensors[high][1]):
                return low, high
    return None


def _have_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and of the one after the last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    return begin, begin + sum(stride * (length - 1) for stride, length in _dims(tensor)) + 1


def _dims(tensor: torch.Tensor) -> list[Dim]:
    item = tensor.element_size()
    return [*((item * stride, length) for length, stride in zip(tensor.shape, tensor.stride(), strict=True)), (1, item)]


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_contiguous() and b.is_contiguous():
        return True  # their spans overlap
    dims, begins = _dims(a), [a.data_ptr(), b.data_ptr()]
    if _have_same_layout(a, b) and not _collide(dims):
        return _collide(dims, begins)
    (begins_a, length_a), (begins_b, length_b) = _runs(a), _runs(b)
    # The runs of b are equally long, so the last one that begins before a run of a ends reaches furthest.
    last = np.searchsorted(begins_b, begins_a + length_a) - 1
    return bool(((last >= 0) & (begins_b[last] + length_b > begins_a)).any())


def _runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """The addresses at which its runs of adjacent bytes begin, ascending, and the length of each run."""
    dims = _merged(sorted((stride, length) for stride, length in _dims(tensor) if stride and length > 1))
    run = dims.pop(0)[1] if dims and dims[0][0] == 1 else 1
    begins = tensor.data_ptr() + _offsets(dims)
    begins.sort()
    return begins, run


def _collide(dims: Sequence[Dim], begins: Sequence[int] = (0,)) -> bool:
    """Returns True if two different index tuples, of one or of different `begins`, have the same offset."""
    if any(length == 0 for _, length in dims):
        return False
    dims = sorted((stride, length) for stride, length in dims if length > 1)
    if dims and dims[0][0] == 0:
        return True
    if len(begins) == 1:
        reach, num_interleaved = 0, 0  # the largest offset in the dimensions so far
        for count, (stride, length) in enumerate(dims, 1):
            if stride <= reach:
                num_interleaved = count
            reach += stride * (length - 1)
        dims = dims[:num_interleaved]  # a stride of the others is larger than all offsets of those before them
        if not dims:
            return False
    numel = len(begins)
    for _, length in dims:
        numel *= length
    if numel > max(begins) - min(begins) + sum(stride * (length - 1) for stride, length in dims) + 1:
        return True  # more elements than offsets
    dims = _merged(dims) or [(1, 1)]
    longest = max(range(len(dims)), key=lambda index: dims[index][1])
    stride, length = dims.pop(longest)
    offsets = (np.asarray(begins)[:, None] - min(begins) + _offsets(dims)).reshape(-1)
    # Along the longest dimension two offsets collide if they differ by a multiple of its stride, less than its length.
    steps = offsets // stride
    keys = offsets % stride * (int(steps.max()) + length + 1) + steps
    keys.sort()
    return keys.size > 1 and int(np.diff(keys).min()) < length


def _merged(dims: Sequence[Dim]) -> list[Dim]:
    """The same offsets in fewer dimensions: one that continues where another ends is merged with it."""
    merged: list[Dim] = []
    for stride, length in dims:
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * length
        else:
            merged.append((stride, length))
    return merged


def _offsets(dims: Sequence[Dim]) -> np.ndarray:
    offsets = np.zeros(1, dtype=np.int64)
    for stride, length in dims:
        offsets = np.add.outer(offsets, stride * np.arange(length)).reshape(-1)
    return offsets

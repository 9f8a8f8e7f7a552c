"""The tensors that collectives accept: torch's, NumPy's and CuPy's, checked and made ready for the core.

Data path: collectives -> ProcessGroup -> **here** -> core. Invariant: the core gets contiguous memory of a device and a
type that it knows; anything else is copied, and copied back when the operation has ended, or refused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bagua import _C
from bagua.distributed.arguments import dtype_code
from bagua.distributed.devices import check_supported, common_device, current_stream, keep_for_current_stream
from bagua.distributed.memory_overlap import shares_with_itself
from bagua.errors import InvalidArgument

__all__ = [
    "Array",
    "Prepared",
    "Residuals",
    "address_of",
    "check_pair",
    "digests_of",
    "local_tensor",
    "prepare",
    "segments_of",
    "split_numels",
]

# Also what hands over its memory by DLPack or the CUDA array interface, such as CuPy's arrays.
Array = torch.Tensor | np.ndarray


class Prepared(NamedTuple):
    """A caller's tensor as the core sees it."""

    data: torch.Tensor  # contiguous
    copy_back: Callable[[], None] | None  # copies the result to the caller's tensor; None if that is `data`


def prepare(tensor: Array, what: str, *, is_written: bool = True, is_moved: bool = False) -> Prepared:
    """The memory of `tensor`, or of a contiguous copy of it.

    Args:
        tensor: any shape and strides, 0-dim and empty ones too.
        what: its name in error messages.
        is_written: whether the operation writes to it; then it may not be read-only, and no two of its elements may
            share memory.
        is_moved: whether the operation only moves the elements; then any type will do.

    Raises:
        InvalidArgument: not a tensor, on a device that the core does not know or of a type that it cannot compute with,
            without memory, sparse, quantized, read-only, or overlapping itself.
    """
    if isinstance(tensor, np.ndarray):
        return _prepare_array(tensor, what, is_written, is_moved)
    if not isinstance(tensor, torch.Tensor):
        tensor = _of_another_library(tensor, what)
    if not tensor.is_cpu:
        check_supported(tensor.device, what)
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{what} has layout {tensor.layout}; convert it with .to_dense() first")
    if not is_moved or tensor.is_quantized:  # whose elements mean nothing without their scale
        dtype_code(tensor.dtype)
    address = address_of(tensor, what)  # before other methods, which a tensor without memory may not have either
    detached = tensor.detach()
    if tensor.is_contiguous():
        if not (tensor.is_neg() or tensor.is_conj()):  # as nearly every tensor is
            return Prepared(detached, None)
    elif is_written:
        _check_overlap(tensor.shape, tensor.stride(), 1, what)
    # The memory of a lazy negative or conjugate holds other values.
    data = detached.resolve_conj().resolve_neg().contiguous()
    if not is_written or data.data_ptr() == address:
        return Prepared(data, None)

    def copy() -> None:
        detached.copy_(data)
        if not data.is_cpu:  # the stream need not be the one that they were made for
            keep_for_current_stream(detached)
            keep_for_current_stream(data)

    return Prepared(data, _copy_back(what, copy))


def _of_another_library(array: Any, what: str) -> torch.Tensor:
    """A tensor in the memory of an array that says where it is. Its values are those of torch's current stream."""
    try:
        if hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return _of_current_gpu(array, what)
    except InvalidArgument:
        raise
    except (RuntimeError, TypeError, ValueError, BufferError, AssertionError) as error:
        raise InvalidArgument(
            f"{what} is a {type(array).__name__}, whose memory torch cannot take: {error}; pass a writable copy in "
            "memory of a CPU or GPU that this torch knows"
        ) from error
    raise InvalidArgument(
        f"{what} is a {type(array).__name__}; give a torch.Tensor, a numpy.ndarray, or an array with DLPack or the "
        "CUDA array interface, such as CuPy's"
    )


def _of_current_gpu(array: Any, what: str) -> torch.Tensor:
    tensor = torch.as_tensor(array, device="cuda")  # a copy, where the array is on another GPU
    if tensor.numel() > 0 and tensor.data_ptr() != array.__cuda_array_interface__["data"][0]:
        raise InvalidArgument(
            f"{what} is a {type(array).__name__} on another GPU than the current one, {tensor.device}; make that of "
            "the array the current one (torch.cuda.set_device), or pass torch.as_tensor(array, device='cuda:1')"
        )
    return tensor


def _prepare_array(array: np.ndarray, what: str, is_written: bool, is_moved: bool) -> Prepared:
    if is_written and not array.flags.writeable:
        raise InvalidArgument(f"{what} is a read-only array, but the result is written to it; pass a copy")
    if is_written:
        _check_overlap(array.shape, array.strides, array.itemsize, what)
    # torch takes no negative strides and no odd ones, of a dimension of one either, and warns of read-only.
    has_odd_stride = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    is_plain = array.flags.c_contiguous and array.flags.writeable and not has_odd_stride
    try:
        data = torch.from_numpy(array if is_plain else array.copy(order="C"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} is an array of {array.dtype}, which cannot be sent: {error}") from None
    if not is_moved:
        dtype_code(data.dtype)
    if not is_written or data.data_ptr() == array.ctypes.data:
        return Prepared(data, None)
    return Prepared(data, _copy_back(what, lambda: np.copyto(array, data.numpy())))


def _copy_back(what: str, copy: Callable[[], object]) -> Callable[[], None]:
    def copy_or_explain() -> None:
        try:
            copy()
        except (RuntimeError, ValueError) as error:
            raise InvalidArgument(
                f"the operation has ended, but its result cannot be written to {what}: {error}; pass a copy, or do not "
                "change it until wait() has returned"
            ) from error

    return copy_or_explain


def _check_overlap(shape: Sequence[int], strides: Sequence[int], item: int, what: str) -> None:
    """Raises InvalidArgument where elements share memory; `item` is the size of one in units of the strides."""
    if not shares_with_itself(shape, strides, item):
        return
    if any(stride == 0 and length > 1 for length, stride in zip(shape, strides, strict=True)):
        raise InvalidArgument(
            f"{what} of shape {tuple(shape)} is expanded: several of its elements share one memory location, so it "
            "cannot hold the result; pass a copy (.clone(), numpy.array)"
        )
    raise InvalidArgument(
        f"{what} of shape {tuple(shape)} and strides {tuple(strides)} overlaps itself: several of its elements "
        "share memory, so it cannot hold the result; pass a copy (.clone(), numpy.array)"
    )


def check_pair(
    first: torch.Tensor, second: torch.Tensor, have: int, want: int, name: str, other: str, size: int
) -> None:
    """Raises InvalidArgument unless input and output have one type and their sizes fit."""
    common_device([("input", first), ("output", second)])
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
    try:
        splits = [operator.index(split) for split in splits]
    except TypeError:
        raise InvalidArgument(f"{name}_splits {splits} must be {size} whole numbers") from None
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise InvalidArgument(f"{name}_splits {splits} must be {size} non-negative numbers that add up to {rows}")
    row_numel = tensor.numel() // rows if rows else 0
    return [split * row_numel for split in splits]


def segments_of(parts: Sequence[tuple[int, torch.Tensor]] | None, data: torch.Tensor) -> list[tuple[int, int, int]]:
    """Offset in elements, number of elements and address of each part, for the core.

    Args:
        parts: (offset in ``data`` in elements, tensor), ascending and disjoint; gaps between them count as zeros. A
            tensor is dense: its elements have the same order in memory as in ``data``. None: ``data`` has the values.

    Raises:
        InvalidArgument: they do not fit ``data``.
    """
    dtype, limit, end = data.dtype, data.numel(), 0
    segments = []
    for begin, part in parts or ():
        numel = part.numel()
        if part.device != data.device:
            common_device([("the tensor", data), (f"the part at offset {begin}", part)])
        if part.dtype is not dtype or begin < end or begin + numel > limit:
            raise InvalidArgument(
                f"a part of {numel} {part.dtype} elements is at offset {begin}, after one that ends at {end}, in a "
                f"tensor of {limit} {dtype}; parts must be ascending, disjoint, and inside the tensor"
            )
        end = begin + numel
        segments.append((begin, numel, address_of(part, "a part")))
    return segments


@dataclass(frozen=True)
class Residuals:
    """Error feedback of an all_reduce with a codec: what earlier ones failed to send, and where this one writes that.

    The outputs may be the inputs. All of one type, float32 or bfloat16, contiguous.

    Attributes:
        worker_in, worker_out: of this rank's contribution, of its size.
        owner_in, owner_out: of the stripe of the result that this rank encodes; empty where it encodes none.
    """

    worker_in: torch.Tensor
    worker_out: torch.Tensor
    owner_in: torch.Tensor
    owner_out: torch.Tensor

    def addresses(self, data: torch.Tensor) -> tuple[int, int, int, int, int]:
        """Returns the core's form, for an operation on `data`. A rank that encodes nothing has empty ones.

        Raises:
            InvalidArgument: their sizes do not fit, or they are not contiguous, not of one type or on another device.
        """
        numel = data.numel()
        tensors = (self.worker_in, self.worker_out, self.owner_in, self.owner_out)
        sizes = [tensor.numel() for tensor in tensors]
        if {*sizes[:2]} not in ({0}, {numel}) or sizes[2] != sizes[3] or sizes[2] > numel:
            raise InvalidArgument(f"residuals have {sizes} elements, the tensor {numel}")
        common_device([("the tensor", data), *(("a residual", tensor) for tensor in tensors if tensor.numel())])
        if len({tensor.dtype for tensor in tensors}) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
            raise InvalidArgument("residuals are not contiguous, or not of one dtype")
        addresses = (address_of(tensor, "a residual") for tensor in tensors)
        return (*addresses, dtype_code(self.worker_in.dtype))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a DTensor that this rank holds, which shares its memory, and any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def digests_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns a 64-bit digest of each tensor, on ``device``; enqueued on the current streams.

    Args:
        tensors: sorted by device.
    """
    parts = []
    for where, some in itertools.groupby(tensors, lambda tensor: tensor.device):
        contiguous = [tensor.detach().contiguous() for tensor in some]
        digests = torch.zeros(len(contiguous), dtype=torch.int64, device=where)
        addresses, sizes = [tensor.data_ptr() for tensor in contiguous], [tensor.nbytes for tensor in contiguous]
        _C.digest(addresses, sizes, digests.data_ptr(), current_stream(where))
        parts.append(digests.to(device, non_blocking=True))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def address_of(tensor: torch.Tensor, what: str) -> int:
    """The address of a tensor's first element.

    Args:
        what: its name in error messages.

    Raises:
        InvalidArgument: it has elements but no memory of its own, as a DTensor or a FakeTensor has none. An empty one
            may have none.
    """
    if type(tensor) is torch.Tensor or not hasattr(tensor, "fake_mode"):  # whose data_ptr() warns
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # of tensors inside torch.func's transforms
            address = 0
        # A view of memory that does not exist has its own offset as address.
        if address != tensor.storage_offset() * tensor.element_size() or tensor.numel() == 0:
            return address
    raise InvalidArgument(f"{what} is a {_kind_without_memory(tensor)}")


def _kind_without_memory(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor without memory in an error message, and the remedy."""
    name = type(tensor).__name__
    if hasattr(tensor, "to_local"):
        return f"{name}, which stands for a tensor that is spread over ranks; pass the local part, .to_local()"
    if hasattr(tensor, "fake_mode"):
        return f"{name}, which has a shape but no values; make and pass the real tensor, outside FakeTensorMode"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return (
            f"{name} of shape {tuple(tensor.shape)} inside a transform of torch.func (vmap, grad, ...), which does not "
            "see through collectives: communicate outside of it, or by bagua.federated"
        )
    return (
        f"{name} of shape {tuple(tensor.shape)} without memory of its own: a wrapper of other tensors, or freed; pass "
        "the tensor that holds the values"
    )

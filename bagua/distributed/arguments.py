"""The arguments of collectives beside tensors: operators, element types, codecs and topologies.

Beside the data path: each check refuses what is not defined and returns the number or name by which the core knows it.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from bagua import _C
from bagua.errors import InvalidArgument

__all__ = [
    "ReduceOp",
    "check_codec",
    "check_op",
    "check_topology",
    "dtype_code",
    "moved_dtype_code",
    "moved_per_element",
]


class ReduceOp(enum.IntEnum):
    """The operators that combine the values of the ranks, by the names of torch.distributed.ReduceOp."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_DTYPE_CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}
_CODEC_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def _has_meaning(op: ReduceOp, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:
        return op not in _BITWISE
    return op is not ReduceOp.AVG and (dtype is not torch.bool or op not in (ReduceOp.SUM, ReduceOp.PRODUCT))


# This is a table because a small message takes as long as its checks.
_MEANINGFUL = {dtype: tuple(_has_meaning(op, dtype) for op in ReduceOp) for dtype in _DTYPE_CODES}


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which the core knows an element type (csrc/common/dtype.h).

    Raises:
        InvalidArgument: the core does not know the type; the types it knows are listed.
    """
    try:
        return _DTYPE_CODES[dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPE_CODES)
        remedy = "give torch.view_as_real of it" if dtype.is_complex else "convert it"
        raise InvalidArgument(f"{dtype} is not supported here; the types are {known}; {remedy}") from None


def moved_dtype_code(dtype: torch.dtype) -> int:
    """The number under which the core moves elements of a type: that of bytes for a type that it does not know."""
    return _DTYPE_CODES.get(dtype, _DTYPE_CODES[torch.uint8])


def moved_per_element(dtype: torch.dtype) -> int:
    """Elements of the type of ``moved_dtype_code`` in one of ``dtype``."""
    return 1 if dtype in _DTYPE_CODES else dtype.itemsize


def check_op(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """`op`, which may be torch.distributed's, as a ReduceOp of ours. Raises InvalidArgument where it has no meaning."""
    if type(op) is not ReduceOp:
        try:
            op = ReduceOp[op.name] if hasattr(op, "name") else ReduceOp(op)
        except (KeyError, ValueError):
            raise InvalidArgument(f"op {op!r} is not one of {', '.join(o.name for o in ReduceOp)}") from None
    if _MEANINGFUL[dtype][op]:
        return op
    if dtype is torch.bool and op is not ReduceOp.AVG:
        raise InvalidArgument(f"{op.name} has no meaning for torch.bool; use BOR or BAND, or convert to an integer")
    need = "an integer or bool" if op in _BITWISE else "a floating-point"
    raise InvalidArgument(f"{op.name} has no meaning for {dtype}; use {need} tensor or another op")


def check_codec(codec: Any, dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM) -> tuple[str, int | None] | None:
    """The codec's specification for the core, and the seed of one that rounds at random.

    Args:
        codec: its name, its name with options, a Codec, or what Codec.with_seed returned.

    Raises:
        InvalidArgument: it is unknown, has no such options, or can't serve this type and operator.
    """
    if codec is None:
        return None
    spec = getattr(codec, "spec", codec)
    names = _C.registered_codecs()
    if not isinstance(spec, str) or spec.partition(":")[0] not in names:
        raise InvalidArgument(f"codec {codec!r} is unknown; the codecs are {', '.join(names)}")
    _C.codec_block_numel(spec)  # raises for unknown options
    if dtype not in _CODEC_DTYPES:
        raise InvalidArgument(f"codec {spec!r} cannot encode {dtype}; it encodes float32, float16 and bfloat16")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidArgument(f"codec {spec!r} cannot be combined with {op.name}; use SUM or AVG")
    return spec, getattr(codec, "seed", None)


def check_topology(topology: str, step: int, dtype: torch.dtype) -> int:
    """The number of a topology (rust_core/src/topology.rs). Raises InvalidArgument for what cannot be averaged."""
    names = _C.topologies()
    if topology not in names:
        raise InvalidArgument(f"topology {topology!r} is unknown; the topologies are {', '.join(sorted(names))}")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise InvalidArgument(f"step {step!r} is not a non-negative integer; count the averagings: 0, 1, 2, ...")
    if not dtype.is_floating_point:
        raise InvalidArgument(f"{dtype} has no averages; convert the tensor to a floating-point type")
    return names.index(topology)

"""Which operations are defined: operators, element types, codecs and topologies, as the core numbers and names them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from bagua import _C
from bagua.errors import InvalidArgument

__all__ = ["ReduceOp", "Residuals", "address_of", "check_codec", "check_op", "check_topology", "dtype_code", "is_known"]


class ReduceOp(enum.IntEnum):
    """How the values of the ranks are combined; the names of torch.distributed.ReduceOp."""

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


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What an all_reduce with a codec did not say before, and where it writes what it does not say now.

    The outputs may be the inputs. All of one type, float32 or bfloat16, contiguous.

    Attributes:
        worker_in, worker_out: of this rank's contribution, of its size.
        owner_in, owner_out: of the stripe of the result that this rank encodes; empty where it encodes none.
    """

    worker_in: torch.Tensor
    worker_out: torch.Tensor
    owner_in: torch.Tensor
    owner_out: torch.Tensor

    def addresses(self, numel: int) -> tuple[int, int, int, int, int]:
        """As the core takes them, for a tensor of `numel` elements. A rank that encodes nothing has empty ones."""
        tensors = (self.worker_in, self.worker_out, self.owner_in, self.owner_out)
        sizes = [tensor.numel() for tensor in tensors]
        if {*sizes[:2]} not in ({0}, {numel}) or sizes[2] != sizes[3] or sizes[2] > numel:
            raise InvalidArgument(f"residuals have {sizes} elements, the tensor {numel}")
        if len({tensor.dtype for tensor in tensors}) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
            raise InvalidArgument("residuals are not contiguous, or not of one dtype")
        addresses = (address_of(tensor, "a residual") for tensor in tensors)
        return (*addresses, _DTYPE_CODES[self.worker_in.dtype])


def address_of(tensor: torch.Tensor, what: str) -> int:
    """Where the elements of a CPU tensor lie.

    Args:
        what: its name in error messages.

    Raises:
        InvalidArgument: it has elements but no memory of its own, as a DTensor or a FakeTensor has none. An empty one
            may have none.
    """
    if type(tensor) is torch.Tensor or not hasattr(tensor, "fake_mode"):  # which warns when it is asked
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # of tensors inside torch.func's transforms
            address = 0
        # A view into memory that is not there begins at its offset from address 0.
        if address != tensor.storage_offset() * tensor.element_size() or tensor.numel() == 0:
            return address
    raise InvalidArgument(f"{what} is a {_kind_without_memory(tensor)}")


def _kind_without_memory(tensor: torch.Tensor) -> str:
    """What to call a tensor that has none, and what to do with it."""
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


def is_known(dtype: torch.dtype) -> bool:
    """Whether the core knows an element type: can reduce it, and not only move its bytes."""
    return dtype in _DTYPE_CODES


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which the core knows an element type (csrc/common/dtype.h).

    Raises:
        InvalidArgument: the core does not know the type; the types it knows are listed.
    """
    try:
        return _DTYPE_CODES[dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPE_CODES)
        raise InvalidArgument(f"{dtype} cannot be sent; the types are {known}") from None


def check_op(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """`op` as our ReduceOp (torch.distributed's is taken too). Raises InvalidArgument where it has no meaning."""
    try:
        op = ReduceOp[op.name] if hasattr(op, "name") else ReduceOp(op)
    except (KeyError, ValueError):
        raise InvalidArgument(f"op {op!r} is not one of {', '.join(o.name for o in ReduceOp)}") from None
    floating = dtype.is_floating_point
    bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    if (bitwise and floating) or (op is ReduceOp.AVG and not floating):
        need = "an integer or bool" if bitwise else "a floating-point"
        raise InvalidArgument(f"{op.name} has no meaning for {dtype}; use {need} tensor or another op")
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        raise InvalidArgument(f"{op.name} has no meaning for torch.bool; use BOR or BAND, or convert to an integer")
    return op


def check_codec(codec: Any, dtype: torch.dtype, op: ReduceOp = ReduceOp.SUM) -> tuple[str, int | None] | None:
    """The codec as the core knows it, and the seed of one that rounds at random.

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

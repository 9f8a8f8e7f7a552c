"""The collectives as functions; names follow torch.distributed.

Tensors are torch tensors or NumPy arrays, of any shape and strides. Ranks in arguments (src, dst) are global ranks, as
in torch.distributed. Collectives work in place unless an output is named. With `async_op=True` they return a Work at
once, otherwise they return None when this rank's part is done. Until the Work's `wait()` has returned, the tensors keep
their memory and their values: no `resize_`, and nothing else that frees their storage.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.distributed.tensors import Array
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import InvalidArgument

if TYPE_CHECKING:
    from bagua.codecs import Codec

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "empty",
    "gather",
    "neighbor_average",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def empty(*size: int | Sequence[int], dtype: torch.dtype = torch.float32, group: GroupLike = None) -> torch.Tensor:
    """A CPU tensor in memory that the group's ranks on this host share: collectives on it are copy-free.

    Args:
        size: the shape, as numbers or as one sequence.

    Returns:
        A contiguous tensor of that shape, zeroed despite the name, because the kernel zeroes new memory.

    Raises:
        InvalidArgument: the shape is none of whole numbers that are not negative, or of more bytes than there are
            addresses.
        TransportError: the system has no shared memory of that size.
    """
    try:
        shape = [operator.index(extent) for extent in (size[0] if len(size) == 1 and np.ndim(size[0]) else size)]
    except TypeError:
        shape = [-1]
    if min(shape, default=0) < 0:
        raise InvalidArgument(
            f"size {size} is no shape; give whole numbers that are not negative, or a sequence of them"
        )
    return resolve(group).empty(math.prod(shape), dtype).view(shape)


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _group_rank(group: ProcessGroup, rank: int, name: str) -> int:
    if rank not in group.ranks:
        group.check()
        raise InvalidArgument(f"{name} {rank} is not a rank of the group '{group.name}' (ranks {group.ranks})")
    return group.ranks.index(rank)


def all_reduce(
    tensor: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = None,
    hierarchical: bool = False,
) -> Work | None:
    """tensor <- op over ranks of tensor.

    Args:
        tensor: same shape and type on all ranks.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        codec: a codec for the two-shot compressed all-reduce, by its name ("bf16", "minmax_uint8", ...), its name with
            options ("qsgd:bits=4"), as codecs.get returned it, or with a seed (Codec.with_seed): what travels is
            encoded, sums are in f32, and all ranks end bit-identical. SUM and AVG of f32, f16 and bf16.
        hierarchical: reduce inside each node at full precision, then among one rank per node (with the codec, if
            any), then broadcast inside each node. Right for nodes with different numbers of ranks. Pays where the
            network is slower than the node; where all ranks are on one node nothing is encoded.

    Raises:
        InvalidArgument: type, op or codec do not fit, or the ranks called different operations.
        DeadlineExceeded, TransportError, RemoteError: a rank is late, dead, or failed first; the message names it.
    """
    work = resolve(group).all_reduce(tensor, op, codec=codec, hierarchical=hierarchical, blocking=not async_op)
    return _finish(work, async_op)


def neighbor_average(
    tensor: Array,
    topology: str = "ring",
    step: int = 0,
    codec: str | Codec | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    hierarchical: bool = False,
) -> Work | None:
    """tensor <- weighted average of this rank's and its neighbours' tensors: decentralised communication.

    All topologies keep the mean over ranks (they are doubly stochastic).

    Args:
        tensor: floating point, same shape and type on all ranks.
        topology: "ring" (left, self, right: 1/3 each), "shift_one" (pairs that change with each step), "matching"
            (pairs that each step draws), "exponential" (averages with the rank that is 2^(step mod ceil(log2 n)) lower;
            exact mean after log2 n steps for n a power of two) or "all" (the mean over all ranks).
        step: the number of averagings before this one, the same on all ranks, on which pairs and distances depend.
        codec: name of a codec for what travels; the own values stay as they are. f32, f16 and bf16.
        hierarchical: the nodes' means, at full precision, are averaged by the topology of nodes, which count by their
            ranks; the codec is for what travels between nodes. Ranks of one node get the same; on one node all do.

    Raises:
        InvalidArgument: topology, step, type or codec do not fit, or the ranks called different operations.
        DeadlineExceeded, TransportError, RemoteError: a rank is late, dead, or failed first; the message names it.

    Source: the primitives D_FP_S and D_LP_S of arXiv 2107.01499.
    """
    work = resolve(group).neighbor_average(
        tensor, topology, step, codec=codec, hierarchical=hierarchical, blocking=not async_op
    )
    return _finish(work, async_op)


def reduce(
    tensor: Array,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """tensor of rank `dst` <- op over ranks of tensor. The other ranks' tensors may be used as scratch."""
    group = resolve(group)
    return _finish(group.reduce(tensor, _group_rank(group, dst, "dst"), op, blocking=not async_op), async_op)


def broadcast(
    tensor: Array,
    src: int,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = None,
) -> Work | None:
    """tensor <- tensor of rank `src`; with a codec the decoded values, there too: all ranks end equal."""
    group = resolve(group)
    src = _group_rank(group, src, "src")
    return _finish(group.broadcast(tensor, src, codec=codec, blocking=not async_op), async_op)


def barrier(group: GroupLike = None, async_op: bool = False) -> Work | None:
    """Returns when every rank of the group has called it."""
    return _finish(resolve(group).barrier(blocking=not async_op), async_op)


def all_gather(
    output: Array,
    input: Array,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = None,
) -> Work | None:
    """output <- the inputs of all ranks, one after the other by rank. output has `size` times input's elements.

    input may be this rank's own block of output; otherwise they share no memory. With a codec the decoded values, the
    own ones too: all ranks end bit-identical.
    """
    return _finish(resolve(group).all_gather(output, input, codec=codec, blocking=not async_op), async_op)


def gather(
    output: Array | None, input: Array, dst: int, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """output of rank `dst` <- the inputs of all ranks by rank; the other ranks pass output=None.

    There input may be the own block of output; otherwise they share no memory.
    """
    group = resolve(group)
    return _finish(group.gather(output, input, _group_rank(group, dst, "dst"), blocking=not async_op), async_op)


def scatter(
    output: Array, input: Array | None, src: int, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """output <- this rank's block of rank `src`'s input; the other ranks pass input=None.

    There output may be the own block of input; otherwise they share no memory.
    """
    group = resolve(group)
    return _finish(group.scatter(output, input, _group_rank(group, src, "src"), blocking=not async_op), async_op)


def reduce_scatter(
    output: Array,
    input: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = None,
) -> Work | None:
    """output <- op over ranks of this rank's block of input. input has `size` times output's elements.

    output may be this rank's own block of input; otherwise they share no memory. With a codec what travels is encoded
    once, the own block too; sums are in f32 and rounded once. SUM and AVG.
    """
    return _finish(resolve(group).reduce_scatter(output, input, op, codec=codec, blocking=not async_op), async_op)


def all_to_all(
    output: Array,
    input: Array,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = None,
) -> Work | None:
    """Block r of input goes to rank r; block r of output comes from rank r. They share no memory.

    Args:
        output_splits, input_splits: rows (of dimension 0) per rank; equal blocks by default.
        codec: name of a codec; every block, the own one too, is encoded and decoded once.
    """
    group = resolve(group)
    work = group.all_to_all(output, input, output_splits, input_splits, codec=codec, blocking=not async_op)
    return _finish(work, async_op)


def send(tensor: Array, dst: int, group: GroupLike = None, async_op: bool = False) -> Work | None:
    """Send tensor to rank `dst`, which calls recv with a tensor of the same size and type.

    Returns when the tensor may be changed: when the connection has taken all of it. Before `dst` calls recv it takes no
    more than it buffers: between ranks of one host `BAGUA_SHM_RING_BYTES` (1 MiB, headers too), over TCP what sockets
    hold. So two ranks that both send more than that to each other, and receive then, wait until the deadline: one of
    them passes `async_op=True`, or receives first.
    """
    group = resolve(group)
    return _finish(group.send(tensor, _group_rank(group, dst, "dst")), async_op)


def recv(tensor: Array, src: int, group: GroupLike = None, async_op: bool = False) -> Work | None:
    """tensor <- what rank `src` sends. Messages of one pair of ranks arrive in the order in which they were sent."""
    group = resolve(group)
    return _finish(group.recv(tensor, _group_rank(group, src, "src")), async_op)


def broadcast_object(obj: object, src: int = 0, group: GroupLike = None) -> Any:
    """The picklable object of rank `src`, on all ranks. Unpickles: use it only among ranks that trust each other.

    Raises:
        InvalidArgument: on all ranks, where the object cannot be pickled, or not be unpickled on one of them; the
            message names that rank and the type. The group can be used afterwards.
    """
    group = resolve(group)
    group.check()
    return group.broadcast_object(obj, _group_rank(group, src, "src"))


def all_gather_object(obj: object, group: GroupLike = None) -> list[Any]:
    """The picklable objects of all ranks, by rank. Unpickles: use it only among ranks that trust each other.

    Raises:
        InvalidArgument: as of broadcast_object.
    """
    group = resolve(group)
    group.check()
    return group.all_gather_object(obj)

"""The collectives with the original project's names and arguments, and the functions that make groups.

Data path: the caller -> **here** -> bagua.ProcessGroup. Only arguments are translated; messages are those of bagua's
own collectives. Ranks in arguments count within ``comm``. Every call returns when this rank's part is complete, on
devices too: all streams of the program may use the result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch

from bagua.distributed.devices import common_device, wait_for_current_stream
from bagua.distributed.memory_overlap import first_to_share
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument
from bagua.torch_api.process_group import (
    BaguaProcessGroup,
    CommMember,
    comm,
    communicating_group,
    from_torch_group,
    get_default_group,
    init_process_group,
    is_initialized,
    new_group,
)

__all__ = [
    "ReduceOp",
    "new_group",
    "from_torch_group",
    "init_process_group",
    "is_initialized",
    "send",
    "recv",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "reduce",
    "reduce_inplace",
    "allreduce",
    "allreduce_inplace",
    "allreduce_coalesced_inplace",
    "allgather",
    "allgather_inplace",
    "gather",
    "gather_inplace",
    "scatter",
    "scatter_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "BaguaProcessGroup",
    "CommMember",
    "comm",
]

_get_default_group = get_default_group  # used by the original's examples


class ReduceOp(enum.IntEnum):
    """The reduction operators, with the original project's numbers."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def send(tensor: torch.Tensor, dst: int, comm: object | None = None) -> None:
    """Sends a tensor to rank ``dst``, which calls recv with one of the same size and type."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.send(tensor, dst))


def recv(tensor: torch.Tensor, src: int, comm: object | None = None) -> None:
    """Receives a tensor from rank ``src`` into ``tensor``."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.recv(tensor, src))


def broadcast(tensor: torch.Tensor, src: int = 0, comm: object | None = None) -> None:
    """Copies the tensor of rank ``src`` to all ranks."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.broadcast(tensor, src, blocking=True))


def broadcast_coalesced(tensors: Iterable[torch.Tensor], src: int = 0, comm: object | None = None) -> None:
    """Broadcasts each of the tensors."""
    for tensor in tensors:
        broadcast(tensor, src, comm)


def broadcast_object(obj: object, src: int = 0, comm: object | None = None) -> object:
    """Returns the object of rank ``src``, pickled and unpickled; use it only among ranks that trust each other."""
    group = communicating_group(comm)
    return obj if group is None else group.broadcast_object(obj, src)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: object | None = None,
) -> None:
    """Reduces send_tensor over ranks into recv_tensor of rank ``dst``; other ranks' recv_tensor is not changed.

    Raises:
        InvalidArgument: the two differ in type or number of elements, or overlap.
    """
    if (group := communicating_group(comm)) is None:
        return
    if group.rank == dst:
        _copy(send_tensor, recv_tensor)
        reduce_inplace(recv_tensor, dst, op, comm)
    else:
        reduce_inplace(send_tensor, dst, op, comm)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: object | None = None) -> None:
    """Reduces the tensor over ranks, in place on rank ``dst``; other ranks' tensors are not changed."""
    if (group := communicating_group(comm)) is not None:
        data = tensor if group.rank == dst else tensor.clone()  # reduce may use it as scratch memory
        _finish(group.reduce(data, dst, _native(op), blocking=True))


def allreduce(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object | None = None
) -> None:
    """Reduces send_tensor over ranks into every rank's recv_tensor; they may be one tensor.

    Raises:
        InvalidArgument: the two differ in type or number of elements, or overlap.
    """
    if communicating_group(comm) is not None:
        _copy(send_tensor, recv_tensor)
        allreduce_inplace(recv_tensor, op, comm)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object | None = None) -> None:
    """Reduces the tensor over ranks, in place on all of them."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.all_reduce(tensor, _native(op), blocking=True))


def allreduce_coalesced_inplace(
    tensors: Iterable[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: object | None = None
) -> None:
    """Calls allreduce_inplace on each of the tensors."""
    for tensor in tensors:
        allreduce_inplace(tensor, op, comm)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object | None = None) -> None:
    """Concatenates the ranks' send_tensors into recv_tensor, which has nranks times their elements."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.all_gather(recv_tensor, send_tensor, blocking=True))


def allgather_inplace(tensor: torch.Tensor, comm: object | None = None) -> None:
    """Gathers within one tensor of nranks blocks, to which each rank contributes the block at its rank."""
    if (group := communicating_group(comm)) is not None:
        blocks = _blocks(tensor, group)
        _finish(group.all_gather(blocks, blocks[group.rank].clone(), blocking=True))


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: object | None = None) -> None:
    """Concatenates the ranks' send_tensors into recv_tensor of rank ``dst``."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.gather(recv_tensor if group.rank == dst else None, send_tensor, dst, blocking=True))


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: object | None = None) -> None:
    """Gathers tensors of ``count`` elements; rank ``dst`` has nranks blocks, its input in the block of its rank.

    Raises:
        InvalidArgument: the tensor has another number of elements.
    """
    if (group := communicating_group(comm)) is None:
        return
    is_root, flat = _check_count(tensor, count, dst, group)
    mine = flat[group.rank * count :][:count].clone() if is_root else flat
    _finish(group.gather(flat if is_root else None, mine, dst, blocking=True))


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: object | None = None) -> None:
    """Sends block r of rank ``src``'s send_tensor to recv_tensor of rank r."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.scatter(recv_tensor, send_tensor if group.rank == src else None, src, blocking=True))


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: object | None = None) -> None:
    """Scatters into tensors of ``count`` elements; rank ``src``'s has nranks times as many and is not changed.

    Raises:
        InvalidArgument: the tensor has another number of elements.
    """
    if (group := communicating_group(comm)) is None:
        return
    is_root, flat = _check_count(tensor, count, src, group)
    output = torch.empty_like(flat[:count]) if is_root else flat
    _finish(group.scatter(output, flat if is_root else None, src, blocking=True))


def reduce_scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object | None = None
) -> None:
    """Reduces block r of send_tensor over ranks into recv_tensor of rank r."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.reduce_scatter(recv_tensor, send_tensor, _native(op), blocking=True))


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: object | None = None) -> None:
    """Reduces the tensor's nranks blocks as reduce_scatter, into its first block; the others are not changed."""
    if (group := communicating_group(comm)) is not None:
        blocks = _blocks(tensor, group)
        _finish(group.reduce_scatter(blocks[0], blocks.clone(), _native(op), blocking=True))


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: object | None = None) -> None:
    """Sends block r of send_tensor to rank r, and receives block r of recv_tensor from it."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.all_to_all(_blocks(recv_tensor, group), _blocks(send_tensor, group), blocking=True))


def alltoall_inplace(tensor: torch.Tensor, comm: object | None = None) -> None:
    """Calls alltoall with one tensor for both."""
    if communicating_group(comm) is not None:
        alltoall(tensor.clone(), tensor, comm)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: object | None = None,
) -> None:
    """Sends send_counts[r] elements of send_tensor, from send_displs[r] on, to rank r; receives likewise.

    Raises:
        InvalidArgument: a count or displacement is missing or out of range, or two ranks' blocks overlap.
    """
    if (group := communicating_group(comm)) is None:
        return
    sources = _parts(send_tensor, send_counts, send_displs, group, "send")
    targets = _parts(recv_tensor, recv_counts, recv_displs, group, "recv")
    if (pair := first_to_share([(0, target) for target in targets])) is not None:
        raise InvalidArgument(
            f"blocks from ranks {pair[0]} and {pair[1]} would share memory: recv_counts {list(recv_counts)} and "
            f"recv_displs {list(recv_displs)} overlap"
        )
    source, received = torch.cat(sources), torch.cat(targets)
    splits = [part.numel() for part in targets], [part.numel() for part in sources]
    group.all_to_all(received, source, *splits, blocking=True).wait()
    for target, part in zip(targets, received.split(splits[0]), strict=True):
        target.copy_(part)
    if not received.is_cpu:
        wait_for_current_stream(received.device)


def alltoall_v_inplace(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: object | None = None
) -> None:
    """Calls alltoall_v with one tensor for both, and the same counts and displacements."""
    if communicating_group(comm) is not None:
        alltoall_v(tensor.clone(), counts, displs, tensor, counts, displs, comm)


def barrier(comm: object | None = None) -> None:
    """Waits until every rank has called it."""
    if (group := communicating_group(comm)) is not None:
        _finish(group.barrier(blocking=True))


def _finish(work: Work) -> None:
    work.wait()
    if work.device is not None:
        wait_for_current_stream(work.device)  # the operation is on it


# ---- arguments


def _rank_not_in_comm(comm: object | None = None) -> bool:
    """Returns True if a collective with this communicator does nothing on this rank."""
    return comm is CommMember.NON_COMM_MEMBER


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    """Returns True if this rank is no member of the group; None means all ranks."""
    return group is not None and _rank_not_in_comm(group.get_global_communicator())


def _native(op: ReduceOp | int) -> object:
    """Returns an operator that bagua accepts; a plain number is one of the original's."""
    try:
        return op if hasattr(op, "name") else ReduceOp(op)
    except ValueError:
        raise InvalidArgument(
            f"op {op!r} is not one of {', '.join(f'{o.name} ({int(o)})' for o in ReduceOp)}"
        ) from None


def _copy(send_tensor: torch.Tensor, recv_tensor: torch.Tensor) -> None:
    if (send_tensor.dtype, send_tensor.numel()) != (recv_tensor.dtype, recv_tensor.numel()):
        raise InvalidArgument(
            f"recv_tensor has {recv_tensor.numel()} elements of {recv_tensor.dtype}, send_tensor {send_tensor.numel()} "
            f"of {send_tensor.dtype}; they must be equal"
        )
    common_device([("send_tensor", send_tensor), ("recv_tensor", recv_tensor)])
    is_same = send_tensor.data_ptr() == recv_tensor.data_ptr() and send_tensor.stride() == recv_tensor.stride()
    if not is_same and first_to_share([(0, recv_tensor)], [(1, send_tensor)]) is not None:
        raise InvalidArgument("send_tensor and recv_tensor overlap; pass one tensor for both, or a copy (.clone())")
    recv_tensor.detach().copy_(send_tensor.detach().reshape(recv_tensor.shape))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, so it cannot be "
            "split into blocks; pass tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def _blocks(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    if tensor.numel() % group.size:
        raise InvalidArgument(f"a tensor of {tensor.numel()} elements cannot be split into {group.size} equal blocks")
    return _flat(tensor).view(group.size, tensor.numel() // group.size)


def _check_count(tensor: torch.Tensor, count: int, root: int, group: ProcessGroup) -> tuple[bool, torch.Tensor]:
    """Returns True on the root, and the flat tensor; checks that it has ``count`` elements (on the root per rank)."""
    is_root = group.rank == root
    numel = count * group.size if is_root else count
    if tensor.numel() != numel:
        raise InvalidArgument(f"tensor has {tensor.numel()} elements, expected {numel} for this count and rank")
    return is_root, _flat(tensor)


def _parts(
    tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], group: ProcessGroup, name: str
) -> list[torch.Tensor]:
    """Returns views of the blocks given by counts and displacements."""
    flat, counts, displs = _flat(tensor), [int(count) for count in counts], [int(displ) for displ in displs]
    ends = [displ + count for displ, count in zip(displs, counts, strict=False)]
    is_inside = min([*counts, *displs], default=0) >= 0 and max(ends, default=0) <= flat.numel()
    if len(counts) != group.size or len(displs) < group.size or not is_inside:
        raise InvalidArgument(
            f"{name}_counts {counts} and {name}_displs {displs} must be one for each of {group.size} ranks and lie in "
            f"{name}_tensor, which has {flat.numel()} elements"
        )
    return [flat[displ:end] for displ, end in zip(displs, ends, strict=False)]

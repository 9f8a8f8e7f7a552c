"""Sums over the clients of all ranks: the only module in which a federated program communicates.

All leaves of a reduction travel in one collective per dtype, through memory that the ranks of a host share, or of the
device that the leaves are on. Nothing here knows of derivatives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from bagua.distributed import consensus
from bagua.distributed.devices import common_device
from bagua.distributed.process_group import COUNTS_FORWARDS
from bagua.errors import InvalidArgument
from bagua.federated.verbs.placement import Placement

HALVES = (torch.float16, torch.bfloat16)


def widened(value: torch.Tensor) -> torch.Tensor:
    """Halves as float32: their sums need not be numbers of their dtype where a mean is one."""
    return value.float() if value.dtype in HALVES else value


def sum_over_ranks(
    placement: Placement, values: Sequence[torch.Tensor], names: Sequence[str], verb: str
) -> list[torch.Tensor]:
    """The values' sums over the ranks.

    Args:
        values: each rank's sums over its own clients, not under any transform.
        names: of the values; none where they have none.

    Returns:
        New tensors of the same shapes and dtypes on the same devices, equal on all ranks.
    """
    group = placement.group
    if group is None:
        return [value.clone() for value in values]
    with placement.lock:
        subject = agree(placement, [Like.of(value) for value in values], names, verb)
        sums = list(values)

        def kind(index: int) -> tuple[str, str]:  # of the ranks, which each have a device of their own
            return str(values[index].dtype), values[index].device.type

        for _, same in groupby(sorted(range(len(values)), key=kind), key=kind):
            indices = list(same)
            totals = _sum_alike(placement, [values[i] for i in indices], subject)
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
        return sums


def _sum_alike(placement: Placement, values: list[torch.Tensor], subject: int) -> list[torch.Tensor]:
    """Sums values of one dtype, on one device."""
    dtype, device = values[0].dtype, common_device(("a value to be summed", value) for value in values)
    real = [torch.view_as_real(value) if dtype.is_complex else value for value in values]
    if dtype is torch.int16:  # which is not sent
        real = [value.to(torch.int32) for value in real]
    buffer = placement.memory(sum(value.numel() for value in real), real[0].dtype, device)
    parts = [part.view(value.shape) for part, value in zip(buffer.split([v.numel() for v in real]), real, strict=True)]
    for part, value in zip(parts, real, strict=True):
        part.copy_(value)
    placement.group.all_reduce(buffer, blocking=True, label=placement.name, subject=subject).wait()
    return [torch.view_as_complex(part.clone()) if dtype.is_complex else part.to(dtype, copy=True) for part in parts]


class Like(NamedTuple):
    """The properties that ranks must have in common of a value that they reduce."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, value: torch.Tensor) -> Like:
        return cls(tuple(value.shape), value.dtype, value.device.type)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}" + (f" on {self.device_type}" if self.device_type != "cpu" else "")


def agree(placement: Placement, values: Sequence[Like], names: Sequence[str], verb: str) -> int:
    """Compares the program, the names and the shapes with the other ranks', the first time that they run here.

    Returns:
        The subject of the collectives: of other shapes or another program it is another one, so that ranks which are
        at different reductions of one size find out, though each was agreed upon before.

    Raises:
        InvalidArgument: on all ranks, naming the first that differs.
    """
    reduction = (verb, *values, *names)
    known = placement.agreed.get(reduction) if placement.is_agreed else None
    if known is not None:
        return known

    def describe() -> tuple[int, dict[str, str]]:
        described = {"the program": placement.program, "the clients": f"{placement.size} {placement.name}"}
        described["the verb"] = verb
        described["how many tensors it reduces"] = str(len(values))
        for index, (name, value) in enumerate(zip(names or [""] * len(values), values, strict=True)):
            described[f"tensor {index} of a client"] = f"{name} {value}".strip()
        return _subject_of(described), described

    with placement.everywhere():
        remedy = "run the same program with values of the same names, in their order, and shapes on all ranks"
        subject = consensus.agree(placement.group, describe, remedy)
        _count(placement)
    placement.is_agreed = True
    placement.agreed[placement.reductions.setdefault(reduction, reduction)] = subject
    return subject


def _subject_of(described: dict[str, str]) -> int:
    """Returns a number below that of COUNTS_FORWARDS, and not 0."""
    digest = hashlib.sha256(repr(list(described.items())).encode()).digest()
    return 1 + int.from_bytes(digest[:8], "little") % (COUNTS_FORWARDS - 1)


def clients_by_rank(placement: Placement) -> list[int]:
    """Returns how many clients each rank holds; the ranks exchange that the first time."""
    with placement.lock, placement.everywhere():
        return _count(placement)


def first_client(clients: Placement) -> int:
    """The number of this rank's first client: how many the ranks before have."""
    rank = 0 if clients.group is None else clients.group.rank
    return sum(clients_by_rank(clients)[:rank])


def _count(placement: Placement) -> list[int]:
    if placement.numbers is None:
        numbers = placement.group.all_gather_plain(placement.num_local)
        if sum(numbers) != placement.size:
            raise InvalidArgument(
                f"the ranks hold {numbers} clients, {sum(numbers)} in all, but the program {placement.program!r} is "
                f"over {placement.size} {placement.name}; give program(num_local=) what each rank holds"
            )
        placement.numbers = numbers
    return placement.numbers


def gather_over_ranks(placement: Placement, values: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    """The values of all clients on every rank, in the order of the ranks: one collective.

    Each rank sends and holds what all clients have: n times as much as a sum, and the server sees every client's
    values.

    Args:
        values: ``[num_local, ...]`` each, not under any transform.
        names: as of sum_over_ranks.

    Returns:
        New tensors ``[n, ...]`` of the same dtypes, equal on all ranks.
    """
    if placement.group is None:
        return [value.clone() for value in values]
    with placement.lock:
        device = common_device(("a value to be gathered", value) for value in values)
        likes = [Like(tuple(value.shape[1:]), value.dtype, device.type) for value in values]
        subject = agree(placement, likes, names, "gather")
        numbers = placement.numbers
        everything = [value.new_empty((placement.size, *value.shape[1:])) for value in values]
        # Tensors without elements are complete as they are, and torch does not view bytes as them.
        filled = [index for index, one in enumerate(everything) if one.numel()]
        if not filled:
            return everything
        # A row of bytes for every client, whatever its tensors are; ranks with fewer clients send rows that none reads.
        rows = [_fresh(values[index]).unsqueeze(-1).flatten(1).view(torch.uint8) for index in filled]
        widths = [row.shape[1] for row in rows]
        most, width = max(numbers), sum(widths)
        memory = placement.memory((1 + len(numbers)) * most * width, torch.uint8, device)
        mine, everyone = memory[: most * width], memory[most * width :]
        mine.view(most, width)[: placement.num_local].copy_(torch.cat(rows, 1))
        placement.group.all_gather(everyone, mine, blocking=True, subject=subject).wait()
        by_rank = everyone.view(len(numbers), most, width)
        gathered = torch.cat([by_rank[rank, :number] for rank, number in enumerate(numbers)])
        for index, part in zip(filled, gathered.split(widths, 1), strict=True):
            everything[index] = _fresh(part).view(values[index].dtype).reshape(everything[index].shape)
        return everything


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with plain strides, also of axes of one element, whose strides `contiguous` does not look at."""
    return tensor.clone(memory_format=torch.contiguous_format)

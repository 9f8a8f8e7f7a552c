"""Python objects between ranks: pickled into tensors, which the collectives of a group carry.

Beside the data path. Unpickling runs code, so only among ranks that trust each other; all ranks of a job prove the
same secret.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

import torch

__all__ = ["all_gather", "broadcast"]


class Group(Protocol):
    """What is needed of a ProcessGroup."""

    rank: int
    size: int

    def broadcast(self, tensor: torch.Tensor, src: int, *, blocking: bool) -> Any: ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, blocking: bool) -> Any: ...


def broadcast(group: Group, obj: object, src: int) -> object:
    """The object of rank `src` of the group, on all its ranks."""
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if group.rank == src else None
    size = torch.tensor([len(payload) if payload is not None else 0])
    group.broadcast(size, src, blocking=True).wait()
    if payload is None:
        payload = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(payload, src, blocking=True).wait()
    return obj if group.rank == src else pickle.loads(payload.numpy().tobytes())


def all_gather(group: Group, obj: object) -> list:
    """The objects of all ranks of the group, by rank."""
    payload = bytearray(pickle.dumps(obj))
    sizes = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([len(payload)]), blocking=True).wait()
    longest = int(sizes.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8)
    everything = torch.empty(group.size * longest, dtype=torch.uint8)
    group.all_gather(everything, mine, blocking=True).wait()
    rows = everything.view(group.size, longest)
    return [pickle.loads(rows[rank, : int(sizes[rank])].numpy().tobytes()) for rank in range(group.size)]

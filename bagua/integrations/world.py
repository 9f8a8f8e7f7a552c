"""Bagua on the ranks that a trainer has connected by torch.distributed, whatever its backend."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import bagua

__all__ = ["join_world"]


def join_world() -> None:
    """Initialises bagua, unless it is, with the ranks of torch.distributed, or with this one alone; collective.

    The rendezvous goes through torch's store, so that no launcher's variables or further port are needed.
    """
    if bagua.is_initialized():
        return
    if dist.is_initialized():
        store = dist.PrefixStore("bagua/trainer", c10d._get_default_store())
        bagua.init_process_group(store=store, rank=dist.get_rank(), world_size=dist.get_world_size())
    else:
        bagua.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

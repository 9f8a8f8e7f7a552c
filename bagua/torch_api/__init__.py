"""The names and arguments of the original Bagua project, as thin aliases, for code that was written for it.

>>> import bagua.torch_api as bagua
>>> bagua.get_world_size()
1

Importing it adds ``with_bagua`` to torch.nn.Module, which importing bagua does not. docs/torch_api.md lists the names,
the differences from the original, and the way to bagua's own interface.
"""

from __future__ import annotations

from typing import NoReturn

from . import algorithms, communication, data_parallel, env, unsupported
from .communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_object,
    from_torch_group,
    gather,
    gather_inplace,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from .distributed import BaguaModule
from .env import get_local_rank, get_local_size, get_rank, get_world_size

__all__ = [
    "BaguaModule",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "communication",
    "data_parallel",
    "env",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]


def __getattr__(name: str) -> NoReturn:
    if name in unsupported.INSTEAD:
        raise unsupported.NoSuchName(unsupported.advice(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

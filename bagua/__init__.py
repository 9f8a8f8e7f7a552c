"""Bagua: data-parallel training for networks that are slower than the accelerators behind them.

>>> import bagua
>>> {"gradient_allreduce", "bytegrad", "qsgd", "qadam", "decentralized", "async_averaging"} <= set(bagua.algorithms.available())
True
"""

from . import algorithms, codecs, metrics, optim, torch_backend
from ._C import __version__
from .data_parallel import DistributedDataParallel, with_bagua
from .distributed.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    empty,
    gather,
    neighbor_average,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .distributed.process_group import ProcessGroup, ReduceOp, Work
from .distributed.world import (
    destroy_process_group,
    from_torch_group,
    get_default_group,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    new_group,
)
from .errors import (
    Aborted,
    BaguaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    RemoteError,
    TransportError,
)
from .replay import profiles

__all__ = [
    "Aborted",
    "BaguaError",
    "DeadlineExceeded",
    "DistributedDataParallel",
    "InternalError",
    "InvalidArgument",
    "ProcessGroup",
    "ReduceOp",
    "RemoteError",
    "TransportError",
    "Work",
    "__version__",
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "codecs",
    "destroy_process_group",
    "empty",
    "from_torch_group",
    "gather",
    "get_default_group",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "metrics",
    "neighbor_average",
    "new_group",
    "optim",
    "profiles",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "torch_backend",
    "with_bagua",
]

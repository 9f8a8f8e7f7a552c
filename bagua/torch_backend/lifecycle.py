"""Creates and closes torch.distributed's groups with the backend "bagua".

Groups share the endpoint of bagua's world (listening sockets, table of ranks, secret). If the program has not
initialised bagua, the first group of all ranks does so, through torch's store, and the last group that is closed
destroys it again. If torch's default group has another backend, not all ranks have the same groups of bagua, so a group
of some ranks has a separate endpoint. Every group has separate worker threads and connections: calls of bagua and of
torch.distributed, and of different groups, never block each other, and only its members take part in making a group.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .. import config
from ..distributed import world
from ..distributed.bootstrap import bootstrap_alone, format_ranks
from ..distributed.job_ranks import JobRanks
from ..distributed.process_group import ProcessGroup
from ..errors import BaguaError, InvalidArgument
from ..torch_version import is_torch_at_least
from .ddp import adapt_ddp
from .group import TorchProcessGroup

__all__ = ["create"]

# Before 2.7 torch released the Python half of a Work while waiting for it in C++; 2.9 is the oldest version tested.
_OLDEST_TORCH = (2, 9)

# An exiting program waits this long for callbacks; those that still run end with it.
_LAST_CALLBACKS_S = 2.0

_open: set[TorchProcessGroup] = set()
_open_alone: set[TorchProcessGroup] = set()
# The default group of bagua, if this file has initialised it.
_opened: ProcessGroup | None = None
# The number of groups made of the same ranks in this world, equal on these ranks because each takes part in all.
_uses: Counter[str] = Counter()


def create(options: Any, backend_options: object | None) -> TorchProcessGroup:
    """Creates a group; torch.distributed calls it on the members.

    Args:
        options: torch's DistributedBackendOptions.
        backend_options: `pg_options` of init_process_group and new_group.

    Raises:
        InvalidArgument: torch is too old, there are backend options, or bagua is initialised with other ranks.
        BaguaError: an error of bagua.init_process_group.
    """
    if not is_torch_at_least(*_OLDEST_TORCH):
        raise InvalidArgument(
            f"the backend 'bagua' needs torch {'.'.join(map(str, _OLDEST_TORCH))} or later, this is "
            f"{torch.__version__}; bagua.init_process_group and bagua's own collectives work with this one too"
        )
    if backend_options is not None:
        raise InvalidArgument(f"the backend 'bagua' takes no options, but pg_options is {backend_options!r}")
    adapt_ddp()
    # torch leaves the list empty for the default group.
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(ranks) < _world_size(options) and not _is_shared():
        return _create_alone(options, ranks)
    world_group = _share_world(options, ranks)
    # options.group_id would not do: with use_local_synchronization it depends on how many other groups a rank is in.
    name = _name(ranks)
    _uses[name] += 1
    group = world_group.subgroup(f"{name}-{_uses[name]}", ranks, options.timeout)
    made = TorchProcessGroup(group, options.store, options.group_id, _forget)
    _open.add(made)
    return made


def _name(ranks: list[int]) -> str:
    return f"torch-{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"


def _world_size(options) -> int:
    """Returns the number of torch's ranks, those of the default group, which may be the one being created."""
    return dist.get_world_size() if options.global_ranks_in_group else options.group_size


def _is_shared() -> bool:
    """Returns True if all ranks have the same world, so that some of them can make a group from it."""
    if isinstance(dist.group.WORLD, TorchProcessGroup):
        return True
    return world.is_initialized() and world.get_default_group() is not _opened


def _store_of(options, ranks: list[int]) -> dist.Store:
    """Returns the store for the rendezvous of a group's members; options.store only for the default group.

    The keys of options.store contain torch's name of the group, on which the members may disagree (see create), and
    may hold values of an earlier group of that name. Groups of the same ranks are counted in torch's default store. A
    launcher that restarts the ranks keeps the store, with the values of the previous attempt.
    """
    attempt = f"bagua/attempt{config.restart_count()}"
    if not options.global_ranks_in_group:
        return dist.PrefixStore(attempt, options.store)
    shared = dist.PrefixStore(f"{attempt}/{_name(ranks)}", c10d._get_default_store())
    return dist.PrefixStore(f"{shared.add(f'turn of {options.group_rank}', 1)}", shared)


def _create_alone(options, ranks: list[int]) -> TorchProcessGroup:
    """Creates a group with a separate endpoint."""
    store = _store_of(options, ranks)
    try:
        group, close = bootstrap_alone(store, ranks, dist.get_rank(), dist.get_world_size(), options.timeout)
    except BaguaError as error:
        raise JobRanks(f"ranks {format_ranks(ranks)}", ranks).told(error) from error
    made = TorchProcessGroup(group, options.store, options.group_id, _forgetter(close))
    _open_alone.add(made)
    return made


def _share_world(options, ranks: list[int]) -> ProcessGroup:
    """Returns bagua's default group; initialises bagua if it is not."""
    global _opened
    is_default = not options.global_ranks_in_group
    rank = options.group_rank if is_default else dist.get_rank()
    size = options.group_size if is_default else dist.get_world_size()
    if world.is_initialized():
        group = world.get_default_group()
        if (group.rank, group.size) != (rank, size):
            raise InvalidArgument(
                f"bagua is initialised as rank {group.rank} of {group.size}, torch.distributed as rank {rank} of "
                f"{size}; they must be the same"
            )
        return group
    world.init_process_group(store=_store_of(options, ranks), rank=rank, world_size=size, timeout=options.timeout)
    _opened = world.get_default_group()
    _uses.clear()
    return _opened


def _forget(group: TorchProcessGroup) -> None:
    """Forgets a closed group; destroys bagua's world after the last one if this file initialised it."""
    global _opened
    _open.discard(group)
    if _open or _opened is None:
        return
    opened, _opened = _opened, None
    # The program may have destroyed this world and made another one since.
    if world.is_initialized() and world.get_default_group() is opened:
        world.destroy_process_group()


def _forgetter(close: Callable[[], None]) -> Callable[[TorchProcessGroup], None]:
    """Returns the _forget of a group with a separate endpoint, which `close` closes."""

    def forget(group: TorchProcessGroup) -> None:
        _open_alone.discard(group)
        close()

    return forget


def _close_all() -> None:
    """Closes the groups of a program that exits without destroying them, so that peers see a shutdown, not a crash.

    Callbacks may wait for callbacks of another group, so the operations of all groups end first, and then all callbacks
    share one deadline.
    """
    groups = [*_open, *_open_alone]
    for group in groups:
        group.levels.end_operations()
    deadline = time.monotonic() + _LAST_CALLBACKS_S
    for group in groups:
        group.shutdown(deadline)


atexit.register(_close_all)


def _forget_in_child() -> None:
    global _opened
    _opened = None
    _open.clear()
    _open_alone.clear()


# A forked child (a DataLoader worker) is not a rank, and closes nothing.
os.register_at_fork(after_in_child=_forget_in_child)

"""torch's groups on bagua's world: who opens it, who closes it, and how the groups are named.

All groups share the world's endpoint (listeners, rank table, secret). The world is bagua's own if the program has made
it, otherwise the first group makes it through torch's store, and the last one to be closed closes it. A group is a
subgroup of the world with worker threads and connections of its own: calls of bagua and of torch.distributed, and of
different groups, never wait for each other, and only a group's members take part in making it.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter

import torch
import torch.distributed as dist

from .. import world
from ..errors import InvalidArgument
from ..group import ProcessGroup
from .group import TorchProcessGroup

__all__ = ["create"]

# Before 2.7 torch let go of the Python half of a Work that it waits for in C++; 2.9 is the oldest that is tested.
_OLDEST_TORCH = (2, 9)

_open: set[TorchProcessGroup] = set()
# The world that this file has opened.
_opened: ProcessGroup | None = None
# How many groups of the same ranks were made in this world: equal on all of them, since all of them make each one.
_uses: Counter[str] = Counter()


def create(options, backend_options: object | None) -> TorchProcessGroup:
    """The creator that torch.distributed calls on the members of a group that is being made.

    Args:
        options: torch's DistributedBackendOptions.
        backend_options: `pg_options` of init_process_group and new_group.

    Raises:
        InvalidArgument: torch is too old, there are backend options, or the group needs a world that is not there.
        BaguaError: what bagua.init_process_group raises.
    """
    if torch.__version__ < _OLDEST_TORCH:
        raise InvalidArgument(
            f"the backend 'bagua' needs torch {'.'.join(map(str, _OLDEST_TORCH))} or later, this is "
            f"{torch.__version__}; bagua.init_process_group and bagua's own collectives work with this one too"
        )
    if backend_options is not None:
        raise InvalidArgument(f"the backend 'bagua' takes no options, but pg_options is {backend_options!r}")
    # torch leaves the list empty for the default group.
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    everybody = _share_world(options, ranks)
    # Not by options.group_id: with use_local_synchronization it depends on how many other groups a rank is in.
    name = f"torch-{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
    _uses[name] += 1
    group = everybody.subgroup(f"{name}-{_uses[name]}", ranks, options.timeout)
    made = TorchProcessGroup(group, options.store, options.group_id, _forget)
    _open.add(made)
    return made


def _share_world(options, ranks: list[int]) -> ProcessGroup:
    """bagua's default group, which is opened here if there is none."""
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
    if len(ranks) != size:
        raise InvalidArgument(
            f"a group of the ranks {ranks} needs the connections of all {size}; call bagua.init_process_group() on "
            'all ranks first, or init_process_group("bagua")'
        )
    world.init_process_group(store=options.store, rank=rank, world_size=size, timeout=options.timeout)
    _opened = world.get_default_group()
    _uses.clear()
    return _opened


def _forget(group: TorchProcessGroup) -> None:
    """Called when a group was closed."""
    global _opened
    _open.discard(group)
    if _open or _opened is None:
        return
    opened, _opened = _opened, None
    # Not a world that the program has made since it destroyed this one.
    if world.is_initialized() and world.get_default_group() is opened:
        world.destroy_process_group()


def _leave_in_child() -> None:
    global _opened
    _opened = None
    _open.clear()


# A forked child (a DataLoader worker) is no rank, and closes nothing.
os.register_at_fork(after_in_child=_leave_in_child)

"""Threads of one process as ranks, over the local transport, for the many tests that need no processes.

The core is the real one (engine, collectives, codecs); only the transport differs. No process is started and torch is
not imported again, so a world of four costs about a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from bagua import _C, config
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import Aborted, BaguaError

__all__ = ["world"]

_SPIN_US = 20.0


class _LocalNetwork:
    """Connects the threads of one world: the first rank that opens a core creates it for all."""

    def __init__(self, nodes: Sequence[int] | None) -> None:
        self._nodes = nodes
        self._thresholds = config.settings().thresholds
        self._lock = threading.Lock()  # guards _cores
        self._cores: dict[tuple, list[_C.Group]] = {}

    def open_core(self, name: str, ranks: list[int], rank: int) -> _C.Group:
        key = (name, *ranks)  # subgroups of different ranks may have one name
        with self._lock:
            if key not in self._cores:
                self._cores[key] = _C.local_world(name, len(ranks), _SPIN_US, self._thresholds)
            return self._cores[key][ranks.index(rank)]

    def report(self, cores: list[_C.Group]) -> None:
        """Does nothing: the core reports failures to all ranks, which are always connected."""

    def close_core(self, core: _C.Group) -> None:
        core.close()

    def share_memory(self, rank: int, peer: int) -> bool:
        return True

    def same_node(self, rank: int, peer: int) -> bool:
        return self._nodes is None or self._nodes[rank] == self._nodes[peer]


def world(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: timedelta | float = timedelta(seconds=20),
    nodes: Sequence[int] | None = None,
) -> list[Any]:
    """Runs ``fn(group, *args)`` on `size` threads, each with its own rank of one ProcessGroup.

    Args:
        size: number of ranks.
        fn: the function of a rank, given its ProcessGroup; must not use the state of bagua.distributed.world.
        timeout: deadline of each operation.
        nodes: the node of each rank, for hierarchical operations; by default all are on one.

    Returns:
        The values that the ranks returned, by rank.

    Raises:
        BaseException: the first exception that a rank raised; the other ranks are aborted.

    Example:
        >>> import torch
        >>> def total(group):
        ...     x = torch.tensor([float(group.rank)])
        ...     group.all_reduce(x).wait()
        ...     return x.item()
        >>> world(3, total)
        [3.0, 3.0, 3.0]
    """
    network = _LocalNetwork(nodes)
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    groups = [ProcessGroup(network, "world", range(size), rank, timeout) for rank in range(size)]
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []  # in the order in which they were raised; append is atomic

    def run(rank: int) -> None:
        try:
            results[rank] = fn(groups[rank], *args)
        except BaseException as error:
            failures.append((rank, error))
            cause = error if isinstance(error, BaguaError) else Aborted(f"rank {rank} raised {error!r}", rank=rank)
            for group in groups:
                group.poison(cause)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    if failures:
        rank, error = failures[0]
        if hasattr(error, "add_note"):  # Python 3.11 and later
            error.add_note(f"raised by rank {rank} of a world of {size}")
        raise error
    return results

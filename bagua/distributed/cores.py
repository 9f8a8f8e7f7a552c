"""The cores of a group on one of its members: a core (_C.Group) is a worker thread with connections of its own.

Data path: ProcessGroup -> **here** -> core. Collectives have one core, send and recv another, so that a message between
two ranks never blocks a collective. What one of them fails with fails the other too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from bagua import _C
from bagua.errors import BaguaError, RemoteError

__all__ = ["GroupCores", "Network"]

_P2P = "/p2p"  # follows the group's name


class Network(Protocol):
    """The connections between ranks: net.links.Endpoint between processes, testing.thread_ranks between threads."""

    def open_core(self, name: str, ranks: list[int], rank: int) -> _C.Group: ...

    def report(self, cores: list[_C.Group]) -> None: ...

    def close_core(self, core: _C.Group) -> None: ...

    def share_memory(self, rank: int, peer: int) -> bool: ...

    def same_node(self, rank: int, peer: int) -> bool: ...


class GroupCores:
    """Opens and closes the cores of one group, and shares failures between them.

    Args:
        network: connects the ranks.
        name: of the group.
        ranks: its global ranks by group rank.
        rank: this process's rank in the group.

    Attributes:
        collectives, p2p: the two cores; one and the same in a group of one rank.
    """

    def __init__(self, network: Network, name: str, ranks: Sequence[int], rank: int):
        self._network = network
        self._cores: list[_C.Group] = []
        self._cause: BaguaError | None = None  # of the group's failure; the first that was raised

        def open_core(suffix: str) -> _C.Group:
            self._cores.append(network.open_core(name + suffix, list(ranks), ranks[rank]))
            return self._cores[-1]

        self.collectives = open_core("")
        # Opened before its first use, so that a peer that sends first finds it; otherwise two ranks could wait for a
        # third that waits for one of them.
        try:
            self.p2p = open_core(_P2P) if len(ranks) > 1 else self.collectives
        except BaseException as error:
            if isinstance(error, BaguaError):  # peers may wait for this rank on the other one
                error = self._first_cause(error)
                network.report(self._cores)
            network.close_core(self.collectives)
            raise error

    def _first_cause(self, error: BaguaError) -> BaguaError:
        """Fails the core that is open with an error. Returns what this rank has failed with first: one of its
        connections may have before, of which the peers have heard then."""
        self.collectives.poison(error)
        try:
            self.collectives.check()
        except BaguaError as cause:
            is_own = not isinstance(cause, RemoteError) and str(cause) != str(error)
            return copy.copy(cause) if is_own else error
        return error

    def check(self) -> None:
        """Raise the first cause when an operation has failed on any rank, and fail both cores with it."""
        if self._cause is None:
            self.share_failure()
        if self._cause is not None:
            raise copy.copy(self._cause)

    def share_failure(self, raised: BaguaError | None = None) -> None:
        """Fail both cores with what one of them failed with, so that peers that wait for this rank on either hear it.

        What was `raised` first stays the cause: by now the other core may have heard of it from a peer, which names
        that peer.
        """
        try:
            for core in self._cores:
                core.check()
        except BaguaError as error:
            if self._cause is None:
                self._cause = copy.copy(raised or error)  # without the frames of the program that it was raised in
            self.poison(self._cause)

    def poison(self, exception: BaguaError) -> None:
        """Make every later call on every connected rank raise `exception` as the first cause."""
        for core in self._cores:
            core.poison(exception)

    def total(self, count: Callable[[_C.Group], int]) -> int:
        """The sum of a number that every core keeps."""
        return sum(count(core) for core in self._cores)

    def close(self) -> None:
        """End the worker threads and announce the shutdown to the peers."""
        for core in self._cores:
            core.abort_pending()
        self.share_failure()
        with contextlib.ExitStack() as stack:  # both close, even if one of them raises
            for core in self._cores:
                stack.callback(self._network.close_core, core)
            self._network.report(self._cores)

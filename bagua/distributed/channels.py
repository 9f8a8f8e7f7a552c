"""The cores of one group on one of its members: worker threads and connections, one set per kind of traffic.

Data path: group -> **here** -> core. Collectives, and send and recv, have a core each, so that a message between two
ranks never stands in the way of a collective.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from bagua import _C
from bagua.errors import BaguaError

__all__ = ["Lanes", "Network"]

_MESSAGES = "/p2p"  # behind the group's name


class Network(Protocol):
    """What connects the ranks: connections.Endpoint between processes, bagua.testing's between threads."""

    def open_core(self, name: str, ranks: list[int], rank: int) -> _C.Group: ...

    def report(self, names: list[str], rank: int) -> None: ...

    def close_core(self, name: str, core: _C.Group) -> None: ...

    def watch(self, name: str, rank: int, peer: int, timeout_s: float) -> None: ...

    def share_memory(self, rank: int, peer: int) -> bool: ...

    def same_node(self, rank: int, peer: int) -> bool: ...


class Lanes:
    """Opens, sums up and closes the cores.

    Args:
        network: connects the ranks.
        name: of the group.
        ranks: its global ranks by group rank.
        rank: this process's rank in the group.

    Attributes:
        collectives, messages: the cores that every member has.
    """

    def __init__(self, network: Network, name: str, ranks: Sequence[int], rank: int):
        self._network, self._name, self._rank = network, name, ranks[rank]
        self._ranks, self._place = list(ranks), rank
        self._cores: dict[str, _C.Group] = {}
        self._cause: BaguaError | None = None  # the first that was raised

        def open_core(suffix: str) -> _C.Group:
            core = self._cores[suffix] = network.open_core(name + suffix, list(ranks), ranks[rank])
            return core

        self.collectives = open_core("")
        # Before its first use, so that a peer that sends first finds it; else two ranks may wait for a third that waits
        # for one of them.
        self.messages = open_core(_MESSAGES) if len(ranks) > 1 else self.collectives

    def check(self) -> None:
        """Raise the first cause when an operation has failed on any rank, and tell the peers of all lanes."""
        if self._cause is None:
            self.share_failure()
        if self._cause is not None:
            raise copy.copy(self._cause)

    def share_failure(self, raised: BaguaError | None = None) -> None:
        """What one lane has failed of, the others fail of too: whoever waits for this rank there learns it at once.

        What was `raised` first stays: meanwhile another lane may have heard of it from a peer, as that one's.
        """
        try:
            for core in self._cores.values():
                core.check()
        except BaguaError as error:
            if self._cause is None:
                self._cause = raised or error
            self.poison(self._cause)

    def poison(self, exception: BaguaError) -> None:
        """Make every later call on every connected rank raise `exception` as the first cause."""
        for core in self._cores.values():
            core.poison(exception)

    def watch(self, peer: int, timeout_s: float) -> None:
        """A message to or from `peer` (of the group) was submitted; of the two the higher rank connects."""
        if peer > self._place and not self.messages.is_attached(peer):
            self._network.watch(self._name + _MESSAGES, self._rank, self._ranks[peer], timeout_s)

    def total(self, count: Callable[[_C.Group], int]) -> int:
        """The sum of a number that every core keeps."""
        return sum(count(core) for core in self._cores.values())

    def close(self) -> None:
        """End the worker threads and say goodbye to the peers."""
        for core in self._cores.values():
            core.abort_pending()
        self.share_failure()
        with contextlib.ExitStack() as stack:  # all of them close, whatever comes in between
            for suffix, core in self._cores.items():
                stack.callback(self._network.close_core, self._name + suffix, core)
            self._network.report([self._name + suffix for suffix in self._cores], self._rank)

"""The cores of one group on one of its members: worker threads and connections, one set per kind of traffic.

Data path: group -> **here** -> core. Collectives, and send and recv, have a core each, so that a message between two
ranks never stands in the way of a collective. Two more, made on first use, carry the stages of hierarchical operations:
among the ranks of a node, and among the nodes' leaders; only the first core drives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from . import _C
from .errors import BaguaError
from .nodes import Nodes

__all__ = ["Hierarchy", "Lanes", "Network"]


class Network(Protocol):
    """What connects the ranks: connections.Endpoint between processes, bagua.testing's between threads."""

    def open_core(self, name: str, ranks: list[int], rank: int, driver: _C.Group | None = None) -> _C.Group: ...

    def close_core(self, name: str, core: _C.Group) -> None: ...

    def share_memory(self, rank: int, peer: int) -> bool: ...

    def same_node(self, rank: int, peer: int) -> bool: ...


class Hierarchy(NamedTuple):
    """The cores of a hierarchical operation's stages."""

    node: _C.Group  # the ranks of this node
    leaders: _C.Group | None  # None where this rank does not lead, or there is one node only


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
        self._network, self._name, self._ranks, self._rank = network, name, list(ranks), rank
        self._cores: dict[str, _C.Group] = {}
        self._hierarchy: Hierarchy | None = None
        everybody = range(len(ranks))
        self.collectives = self._open("", everybody)
        # Before its first use, so that a peer that sends first finds it; else two ranks may wait for a third that waits
        # for one of them.
        self.messages = self._open("/p2p", everybody) if len(ranks) > 1 else self.collectives

    def _open(self, suffix: str, members: Sequence[int], driver: _C.Group | None = None) -> _C.Group:
        ranks = [self._ranks[member] for member in members]
        core = self._network.open_core(self._name + suffix, ranks, self._ranks[self._rank], driver)
        self._cores[suffix] = core
        return core

    @property
    def nodes(self) -> Nodes:
        """The ranks of the group by node."""
        ranks, network = self._ranks, self._network
        return Nodes.of(len(ranks), lambda a, b: network.same_node(ranks[a], ranks[b]))

    @property
    def hierarchy(self) -> Hierarchy:
        """The cores of the stages; opened when they are first asked for."""
        if self._hierarchy is None:
            nodes = self.nodes
            leaders = nodes.leaders
            joins = self._rank in leaders and len(leaders) > 1
            self._hierarchy = Hierarchy(
                self._open("/node", nodes.node_of(self._rank), self.collectives),
                self._open("/leaders", leaders, self.collectives) if joins else None,
            )
        return self._hierarchy

    def check(self) -> None:
        """Raise the first cause when an operation has failed on any rank, and tell the peers of all lanes."""
        try:
            for core in self._cores.values():
                core.check()
        except BaguaError as error:
            self.poison(error)
            raise

    def poison(self, exception: BaguaError) -> None:
        """Make every later call on every connected rank raise `exception` as the first cause."""
        for core in self._cores.values():
            core.poison(exception)

    def total(self, count: Callable[[_C.Group], int]) -> int:
        """The sum of a number that every core keeps."""
        return sum(count(core) for core in self._cores.values())

    def close(self) -> None:
        """End the worker threads and say goodbye to the peers."""
        for suffix, core in self._cores.items():
            self._network.close_core(self._name + suffix, core)

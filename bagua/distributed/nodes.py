"""The nodes of a group's ranks, and the rank that leads each node, for hierarchical collectives.

Beside the data path. Invariant: a pure function of what all ranks know (which rank is on which host), so all ranks
agree without a message. A node is a host as the rendezvous sees it; nodes may have different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Nodes"]


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node.

    Attributes:
        members: group ranks of each node, ascending; nodes in the order of their lowest ranks, which lead them.

    Example:
        >>> Nodes.of(5, lambda rank, peer: (rank < 2) == (peer < 2))
        Nodes(members=((0, 1), (2, 3, 4)))
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, size: int, same_node: Callable[[int, int], bool]) -> Nodes:
        """Sort `size` ranks into nodes, given which pairs share one."""
        members: list[list[int]] = []
        for rank in range(size):
            node = next((node for node in members if same_node(node[0], rank)), None)
            if node is None:
                members.append([rank])
            else:
                node.append(rank)
        return cls(tuple(tuple(node) for node in members))

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each node."""
        return [node[0] for node in self.members]

    @property
    def smallest(self) -> int:
        """The least number of ranks of any node."""
        return min(map(len, self.members))

    def node_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node that `rank` is on."""
        return next(node for node in self.members if rank in node)

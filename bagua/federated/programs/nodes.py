"""Platforms whose clients are nodes of another framework, each of which may fail, be out of reach or late.

A node drops out of a run, for good, when its client fails, the framework cannot reach it, or the timeout ends before
its reply. As long as enough are left for the run's threshold that is logged; otherwise the run ends with an error that
names the nodes.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument
from bagua.federated.programs.platform import Platform

logger = logging.getLogger("bagua")
POLL_SECONDS = 0.1


class NodePlatform(Platform):
    """Nodes of a framework, named as the framework names them.

    Args:
        clients: how many nodes there are, which are waited for; or the names of those that take part.
        timeout: in seconds, of the wait for nodes and of each exchange.

    Raises:
        InvalidArgument: there are more nodes than `clients`, so it is open which take part.
        DeadlineExceeded: there are fewer after `timeout`.
    """

    framework: str
    at_a_node: str  # the process of the framework there

    def __init__(self, clients: int | Sequence[Any], timeout: float) -> None:
        self._timeout, self._exchanges = timeout, 0
        self.nodes = self._wait_for(clients) if isinstance(clients, int) else list(clients)
        self.begin(len(self.nodes))

    @abstractmethod
    def _connected(self) -> Sequence[Any]:
        """Returns the nodes that the framework reaches."""

    @abstractmethod
    def _send(self, request: bytes, number: int, nodes: Sequence[Any], enough: int) -> tuple[dict, dict]:
        """Gives the request to nodes, and returns at once where fewer than `enough` can still reply.

        Args:
            number: of the exchange.

        Returns:
            By node, the replies, and texts of what went wrong. Those that are in neither did not reply in time.
        """

    @property
    def num_clients(self) -> int:
        return len(self.nodes)

    def begin(self, enough: int) -> None:
        self._enough, self._left = enough, list(self.nodes)

    def exchange(self, request: bytes) -> list[bytes]:
        """Replies in the order of ``nodes``, of those that have not dropped out of the run.

        Raises:
            BaguaError: too few are left after clients have failed at nodes, which are named; with the error of one.
            DeadlineExceeded: too few are left after nodes did not reply within the timeout, though those whose clients
                have failed would have left enough; all are named.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        replies, errors = self._send(request, number, self._left, self._enough)
        missing = [node for node in self._left if node not in replies and node not in errors]
        where = f"in exchange {number} of {len(self.nodes)} clients"
        if len(replies) < self._enough:
            if self._enough < len(self.nodes):
                where += f", of which {self._enough} are needed and {len(self._left)} were left"
            if len(self._left) - len(errors) < self._enough:
                node = next(iter(errors))
                raise BaguaError(
                    f"the client on node {', '.join(map(str, errors))} of {self.framework} failed {where}; "
                    f"node {node}, {errors[node]}"
                )
            failed = "".join(f"; the client on node {node} failed, {text}" for node, text in errors.items())
            raise DeadlineExceeded(
                f"node {', '.join(map(str, missing))} of {self.framework} did not reply {where}, within "
                f"{self._timeout:g} s: is its {self.at_a_node} running?{failed}"
            )
        for node in (*errors, *missing):
            reason = errors.get(node, f"no reply within {self._timeout:g} s")
            logger.warning("node %s of %s has dropped out %s: %s", node, self.framework, where, reason)
        self._left = [node for node in self._left if node in replies]
        return [replies[node] for node in self._left]

    def _wait_for(self, count: int) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        while len(nodes := sorted(self._connected())) < count:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{len(nodes)} nodes of {self.framework} are connected after {self._timeout:g} s, expected "
                    f"{count}: {nodes}"
                )
            time.sleep(POLL_SECONDS)
        if len(nodes) > count:
            raise InvalidArgument(
                f"{len(nodes)} nodes of {self.framework} for {count} clients: give those that take part, of {nodes}"
            )
        return nodes

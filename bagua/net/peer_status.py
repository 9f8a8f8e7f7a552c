"""Status between ranks that are not connected: what a rank is doing, and why a group has failed.

Beside the data path, over TCP connections that last for one message (connected ranks use their control link). A rank
that waits for a connection queries the peer. The answer carries the first cause of a failure, and so does the report
that a rank sends when it closes a failed group.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bagua import _C
from bagua.errors import BaguaError, RemoteError, TransportError
from bagua.net.connector import Deadline, notify, query
from bagua.net.rendezvous import RankRecord

__all__ = ["PeerStatus", "RegisteredGroup"]

logger = logging.getLogger("bagua")

_ANSWER_SECONDS = 1.0
_REPORT_SECONDS = 0.3  # for all of them together; a rank that is listening takes it at once
_MAX_REPORTS = 32
_MAX_CLOSED_GROUPS = 1000
_MAX_TEXT = 1000  # characters; fits the first message of a connection, however JSON escapes them


@dataclass
class RegisteredGroup:
    """A group that accepts connections."""

    core: _C.Group
    ranks: list[int]  # global ranks by group rank

    def cause(self) -> dict | None:
        """The first cause of the group's failure."""
        try:
            self.core.check()
        except BaguaError as error:
            text = str(error)
            text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
            return {"kind": type(error).__name__, "text": text, "rank": error.rank, "operation": error.operation}
        return None


class PeerStatus:
    """Queries, answers and reports for the groups of one process.

    Args:
        records: of all ranks, by global rank.
        secret: of the job.
        groups: those of this process, by name; kept up to date by the caller.
        process: what the program is blocked in.
    """

    def __init__(
        self,
        records: list[RankRecord],
        secret: bytes,
        groups: dict[str, RegisteredGroup],
        process: _C.ProcessWaits,
    ):
        self._records, self._secret, self._groups, self._process = records, secret, groups, process
        # The groups that were closed last, each with the cause of its failure, if it failed. A group is entered here
        # before it is removed from `groups`, where readers look first.
        self._closed: dict[str, dict | None] = {}
        self._lock = threading.Lock()  # guards writes to _closed

    def query(
        self,
        name: str,
        registered: RegisteredGroup,
        rank: int,
        peer: int,
        still_wanted: Callable[[], None],
        seconds: float = _ANSWER_SECONDS,
    ) -> bool:
        """Exchange status with a rank (`rank` and `peer` are global): what each is doing in the group.

        Returns:
            Whether the peer has answered within `seconds`.

        Raises:
            InvalidArgument: the two are in different operations.
            RemoteError: the group has failed on the peer.
            ConnectionRefusedError: nobody listens there.
        """
        about = {"group": name, "from": rank, "to": peer, "status": registered.core.status().hex()}
        deadline = Deadline(time.monotonic() + seconds, still_wanted)
        group_peer = registered.ranks.index(peer)
        registered.core.note_status_request(group_peer)
        try:
            answer = json.loads(query(self._records[peer], self._secret, about, deadline))
        except ConnectionRefusedError:
            raise
        except (OSError, TransportError):
            return False
        if answer["cause"] is not None:
            raise _remote(answer["cause"], group_peer)
        registered.core.take_answer(group_peer, bytes.fromhex(answer["status"]))
        return True

    def report(self, names: Iterable[str], rank: int) -> None:
        """Called before groups of the same ranks are closed: if they have failed, notify ranks that are not connected.

        All of them, or in large groups those at distances of powers of two, which notify others when they close
        theirs. A rank that cannot be reached at once finds out by its own query, or from another rank.
        """
        groups = [self._groups[name] for name in names if name in self._groups]
        causes = [cause for group in groups if (cause := group.cause()) is not None]
        if not causes:
            return
        for name in names:
            self.group_closes(name, causes[0])
        cores, ranks = [group.core for group in groups], groups[0].ranks
        size, group_rank = len(ranks), ranks.index(rank)
        distances = range(1, size) if size <= _MAX_REPORTS else [1 << k for k in range((size - 1).bit_length())]
        peers = {(group_rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {group_rank}
        targets = [peer for peer in sorted(peers) if not any(core.is_attached(peer) for core in cores)]
        about = {"groups": list(names), "from": rank, "cause": causes[0]}
        try:
            missed = notify([self._records[ranks[peer]] for peer in targets], self._secret, about, _REPORT_SECONDS)
        except OSError as error:  # such as no descriptor left: the cause of the failure matters more than this
            logger.warning("other ranks could not be notified why a group failed: %s", error)
        else:
            logger.debug("%d of %d ranks could not be notified why a group failed", missed, len(targets))

    def has_failed(self, name: str) -> bool:
        """Whether a group of this name was closed after a failure."""
        return self._closed.get(name) is not None

    def group_opened(self, name: str) -> None:
        """A group of this name has been made."""
        with self._lock:
            self._closed.pop(name, None)

    def group_closes(self, name: str, cause: dict | None = None) -> None:
        """A group of this name is about to be closed, after a failure if there is a cause."""
        with self._lock:
            self._closed.setdefault(name, cause)
            if len(self._closed) > _MAX_CLOSED_GROUPS:
                del self._closed[next(iter(self._closed))]

    @staticmethod
    def is_status_message(about: dict) -> bool:
        """Whether an authenticated connection is a query or a report, rather than a part of a link."""
        return "status" in about or "cause" in about

    def handle(self, sock: socket.socket, about: dict) -> None:
        """Serve a peer's query or report, on the listener's thread; owns the socket."""
        with sock:
            if "cause" in about:
                for name in about["groups"]:
                    self._handle_report(name, about)
            else:
                self._answer(sock, about)

    def _handle_report(self, name: str, about: dict) -> None:
        registered = self._groups.get(name)
        if registered is not None:
            registered.core.poison(_remote(about["cause"], registered.ranks.index(about["from"])))

    def _answer(self, sock: socket.socket, about: dict) -> None:
        registered = self._groups.get(about["group"])
        if registered is None:
            has_left, cause = about["group"] in self._closed, self._closed.get(about["group"])
            answer = {"status": self._process.status(has_left).hex(), "cause": cause}
        else:
            answer = {"status": registered.core.answer().hex(), "cause": registered.cause()}
        message = json.dumps(answer).encode()
        sock.sendall(len(message).to_bytes(4, "little") + message)
        if registered is not None:
            try:
                registered.core.take_answer(registered.ranks.index(about["from"]), bytes.fromhex(about["status"]))
            except BaguaError as error:
                registered.core.poison(error)


def _remote(cause: dict, group_peer: int) -> BaguaError:
    """The first cause, as another rank's failure. A rank that only passes it on is not named; Mesh::attach has the same
    rules."""
    text, rank, kind = cause["text"], cause["rank"], cause["kind"]
    if kind != "RemoteError":
        text = f"rank {group_peer} reported: {text}"
        if rank is None and kind != "DeadlineExceeded":
            rank = group_peer
    return RemoteError(text, rank=rank, operation=cause["operation"])

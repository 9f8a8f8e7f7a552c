"""What ranks that are not connected say to one another: what a rank is doing, and why a group has failed.

Beside the data path, over TCP connections that last for one message (connected ranks use their control link). Who
waits for a connection asks; the answer, and a report when a failed group is closed, carry the first cause.
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
from bagua.net.connector import Patience, ask, tell
from bagua.net.rendezvous import RankRecord

__all__ = ["Questions", "Registered"]

logger = logging.getLogger("bagua")

_ANSWER_SECONDS = 1.0
_REPORT_SECONDS = 0.3  # to all of them; who listens takes it at once
_MAX_REPORTS = 32
_MAX_ENDED = 1000
_MAX_TEXT = 1000  # characters; fits the first message of a connection, however JSON writes them


@dataclass
class Registered:
    """A group that takes connections."""

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


class Questions:
    """Asks, answers and reports for the groups of one process.

    Args:
        records: of all ranks, by global rank.
        secret: of the job.
        groups: those of this process, by name; kept up to date by the caller.
        process: what its program stands still for.
    """

    def __init__(
        self,
        records: list[RankRecord],
        secret: bytes,
        groups: dict[str, Registered],
        process: _C.ProcessWaits,
    ):
        self._records, self._secret, self._groups, self._process = records, secret, groups, process
        # The latest groups that were closed, and why those have failed that did. A group is here before it is gone from
        # `groups`, into which readers look first.
        self._ended: dict[str, dict | None] = {}
        self._lock = threading.Lock()  # for changes of it

    def ask(
        self,
        name: str,
        registered: Registered,
        rank: int,
        peer: int,
        still_wanted: Callable[[], None],
        seconds: float = _ANSWER_SECONDS,
    ) -> bool:
        """What a rank (global) does in a group; it learns what this one does. Waits `seconds` for the answer.

        Returns:
            Whether it has answered.

        Raises:
            InvalidArgument: they are in different operations.
            RemoteError: there, the group has failed.
            ConnectionRefusedError: nobody listens there.
        """
        about = {"group": name, "from": rank, "status": registered.core.status().hex()}
        patience = Patience(time.monotonic() + seconds, still_wanted)
        group_peer = registered.ranks.index(peer)
        registered.core.note_status_request(group_peer)
        try:
            answer = json.loads(ask(self._records[peer], self._secret, about, patience))
        except ConnectionRefusedError:
            raise
        except (OSError, TransportError):
            return False
        if answer["cause"] is not None:
            raise _remote(answer["cause"], group_peer)
        registered.core.take_answer(group_peer, bytes.fromhex(answer["status"]))
        return True

    def report(self, names: Iterable[str], rank: int) -> None:
        """Before groups of the same ranks are closed: if they have failed, tell those who are not connected.

        All of them, or in large groups those at distances of powers of two, which tell others when they end. Who cannot
        be reached at once learns it by asking, or from another rank.
        """
        groups = [self._groups[name] for name in names if name in self._groups]
        causes = [cause for group in groups if (cause := group.cause()) is not None]
        if not causes:
            return
        for name in names:
            self.end(name, causes[0])
        cores, ranks = [group.core for group in groups], groups[0].ranks
        size, place = len(ranks), ranks.index(rank)
        distances = range(1, size) if size <= _MAX_REPORTS else [1 << k for k in range((size - 1).bit_length())]
        peers = {(place + sign * distance) % size for distance in distances for sign in (1, -1)} - {place}
        targets = [peer for peer in sorted(peers) if not any(core.is_attached(peer) for core in cores)]
        about = {"groups": list(names), "from": rank, "cause": causes[0]}
        try:
            untold = tell([self._records[ranks[peer]] for peer in targets], self._secret, about, _REPORT_SECONDS)
        except OSError as error:  # no descriptor left, say: the cause of the failure matters more than this
            logger.warning("other ranks were not told why a group failed: %s", error)
        else:
            logger.debug("%d of %d ranks were not told why a group failed", untold, len(targets))

    def has_ended(self, name: str) -> bool:
        """Whether the group was closed after a failure."""
        return self._ended.get(name) is not None

    def begin(self, name: str) -> None:
        """A group of this name has been made."""
        with self._lock:
            self._ended.pop(name, None)

    def end(self, name: str, cause: dict | None = None) -> None:
        """A group of this name is about to be closed, after a failure if there is a cause."""
        with self._lock:
            self._ended.setdefault(name, cause)
            if len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def is_one(self, about: dict) -> bool:
        """Whether an authenticated connection is a question or a report."""
        return "status" in about or "cause" in about

    def take(self, sock: socket.socket, about: dict) -> None:
        """The other side of ask and report, on the acceptor's thread; owns the socket."""
        with sock:
            if "cause" in about:
                for name in about["groups"]:
                    self._take_report(name, about)
            else:
                self._answer(sock, about)

    def _take_report(self, name: str, about: dict) -> None:
        registered = self._groups.get(name)
        if registered is not None:
            registered.core.poison(_remote(about["cause"], registered.ranks.index(about["from"])))

    def _answer(self, sock: socket.socket, about: dict) -> None:
        registered = self._groups.get(about["group"])
        if registered is None:
            has_left, cause = about["group"] in self._ended, self._ended.get(about["group"])
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
    """The first cause as another rank's; who only passes it on is not named (Mesh::attach has the same rules)."""
    text, rank, kind = cause["text"], cause["rank"], cause["kind"]
    if kind != "RemoteError":
        text = f"rank {group_peer} reported: {text}"
        if rank is None and kind != "DeadlineExceeded":
            rank = group_peer
    return RemoteError(text, rank=rank, operation=cause["operation"])

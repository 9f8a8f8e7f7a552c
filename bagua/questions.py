"""What ranks that are not connected say to one another: what a rank is doing, and why a group has failed.

Beside the data path, over a TCP connection that lasts for one message (connected ranks use their control link).
Who waits for a connection asks; the answer, and a report when a failed group is closed, carry the first cause.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import _C
from .dialing import Patience, ask, tell
from .errors import BaguaError, RemoteError, TransportError
from .rendezvous import RankRecord

__all__ = ["Questions", "Registered"]

_ANSWER_SECONDS = 1.0
_REPORT_SECONDS = 0.3  # to all; who listens answers at once
# A message travels in the first message of a connection, which is small.
_MAX_TEXT = 2000


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
            return {
                "kind": type(error).__name__,
                "text": str(error)[:_MAX_TEXT],
                "rank": error.rank,
                "operation": error.operation,
            }
        return None


class Questions:
    """Asks, answers and reports for the groups of one process.

    Args:
        records: of all ranks, by global rank.
        secret: of the job.
        groups: those of this process, by name; kept up to date by the caller.
    """

    def __init__(self, records: list[RankRecord], secret: bytes, groups: dict[str, Registered]):
        self._records, self._secret, self._groups = records, secret, groups

    def compare(
        self, name: str, registered: Registered, rank: int, peer: int, still_wanted: Callable[[], None]
    ) -> None:
        """Ask a rank (global) what it does in a group, and tell it what this one does.

        Raises:
            InvalidArgument: they are in different operations.
            RemoteError: there, the group has failed.
            ConnectionRefusedError: nobody listens there.
        """
        about = {"group": name, "from": rank, "status": registered.core.status().hex()}
        try:
            answer = json.loads(ask(self._records[peer], self._secret, about, _patience(_ANSWER_SECONDS, still_wanted)))
        except ConnectionRefusedError:
            raise
        except (OSError, TransportError):
            return  # it is busy, stopped or out of reach: the deadline tells
        if not answer:
            return  # it has no such group (yet)
        group_peer = registered.ranks.index(peer)
        if answer["cause"] is not None:
            raise _remote(answer["cause"], group_peer)
        registered.core.check_status(group_peer, bytes.fromhex(answer["status"]))

    def report(self, name: str, rank: int) -> None:
        """If the group has failed, tell the first cause to ranks that would not learn it from this one's end.

        Those at distances of powers of two, which tell their peers in turn: so all of them get to know in few steps.
        """
        registered = self._groups.get(name)
        cause = registered.cause() if registered is not None else None
        if cause is None:
            return
        size, place = len(registered.ranks), registered.ranks.index(rank)
        distances = [1 << k for k in range((size - 1).bit_length())]
        targets = {(place + sign * distance) % size for distance in distances for sign in (1, -1)}
        patience = _patience(_REPORT_SECONDS, lambda: None)
        for target in sorted(targets - {place, cause["rank"]}):
            if registered.core.is_attached(target):
                continue
            try:
                about = {"group": name, "from": rank, "cause": cause}
                tell(self._records[registered.ranks[target]], self._secret, about, patience)
            except (OSError, TransportError):
                continue  # it has ended, or is out of reach

    def is_one(self, about: dict) -> bool:
        """Whether an authenticated connection is a question or a report."""
        return "status" in about or "cause" in about

    def take(self, sock: socket.socket, about: dict) -> None:
        """The other side of compare and report, on the acceptor's thread; owns the socket."""
        registered = self._groups.get(about["group"])
        with sock:
            if "status" in about:
                known = {} if registered is None else _answer(registered)
                message = json.dumps(known).encode()
                sock.sendall(len(message).to_bytes(4, "little") + message)
        if registered is None:
            return
        group_peer = registered.ranks.index(about["from"])
        try:
            if "cause" in about:
                raise _remote(about["cause"], group_peer)
            registered.core.check_status(group_peer, bytes.fromhex(about["status"]))
        except BaguaError as error:
            registered.core.poison(error)


def _patience(seconds: float, still_wanted: Callable[[], None]) -> Patience:
    return Patience(time.monotonic() + seconds, still_wanted)


def _answer(registered: Registered) -> dict:
    return {"status": registered.core.status().hex(), "cause": registered.cause()}


def _remote(cause: dict, group_peer: int) -> BaguaError:
    """The first cause as another rank's; who only passes it on is not named."""
    text, rank = cause["text"], cause["rank"]
    if cause["kind"] != "RemoteError":
        text = f"rank {group_peer} reported: {text}"
    return RemoteError(text, rank=group_peer if rank is None else rank, operation=cause["operation"])

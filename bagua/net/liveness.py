"""How a rank that waits for another one to connect learns that it waits in vain: it asks, again and again.

Beside the data path. Of two ranks the higher one dials, so that the lower one would hear nothing of a peer that has
died, or whose group has failed. A collective asks on the thread that runs it (links.py). The thread that moves
messages must not stand still for one of them, so "bagua-watch" asks for those, and for ranks that are dialed for long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bagua.errors import BaguaError, TransportError
from bagua.net.connector import is_gone
from bagua.net.peer_status import Questions, Registered
from bagua.net.rendezvous import RankRecord

__all__ = ["REFUSED_SECONDS", "Watch", "Watcher", "gone"]

logger = logging.getLogger("bagua")

# A listener is there before its rank is known to others, so one that refuses belongs to a process that has ended. The
# reason, if there is one, comes within this time (Questions.report).
REFUSED_SECONDS = 0.5
# Who has waited for this long asks: the peer may be in another operation, in which neither will ever connect.
# (Mesh::ask does so over connections.) Later questions come at doubling intervals, up to a part of what the wait may
# take: a peer that dies meanwhile is to be noticed long before the deadline.
_FIRST_QUESTION_SECONDS = 0.5
_LONGEST_INTERVAL_SECONDS = 8.0
_INTERVALS_PER_TIMEOUT = 16
_POLL_SECONDS = 0.1


class Watch:
    """The wait for one rank to connect.

    Args:
        questions: asks.
        record: of the awaited rank.
        name, registered: the group.
        rank, peer: this rank and the awaited one, global.
        shares_memory: whether the two do, so that its Unix listener tells without a message whether it is there.
        timeout_s: how long the wait may take.
    """

    def __init__(
        self,
        questions: Questions,
        record: RankRecord,
        name: str,
        registered: Registered,
        rank: int,
        peer: int,
        shares_memory: bool,
        timeout_s: float,
    ):
        self.name, self.core, self.peer = name, registered.core, peer
        self.group_peer = registered.ranks.index(peer)
        self._questions, self._record, self._registered = questions, record, registered
        self._rank, self._shares_memory = rank, shares_memory
        self._interval = _FIRST_QUESTION_SECONDS
        self._longest_interval = min(
            max(timeout_s / _INTERVALS_PER_TIMEOUT, _FIRST_QUESTION_SECONDS), _LONGEST_INTERVAL_SECONDS
        )
        self._next_look = self._next_question = time.monotonic() + self._interval
        self._has_refused = False

    def look(self, still_wanted: Callable[[], None]) -> None:
        """Finds out how the peer is, when it is time to; `still_wanted` may raise while the answer is under way.

        Raises:
            TransportError: its process has ended.
            InvalidArgument: it is in another operation.
            RemoteError: there, the group has failed.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + REFUSED_SECONDS
        try:
            if self._shares_memory and is_gone(self._record):
                raise ConnectionRefusedError
            if now >= self._next_question:
                self._questions.ask(self.name, self._registered, self._rank, self.peer, still_wanted)
                self._interval = min(2 * self._interval, self._longest_interval)
                self._next_question = time.monotonic() + self._interval
        except ConnectionRefusedError as error:
            if self._has_refused:
                raise gone(self._record, self.group_peer) from error
            self._has_refused = True

    def is_over(self) -> bool:
        """Whether nothing waits for the peer any more: it has connected, or all that waited has ended."""
        try:
            self.core.check()
        except BaguaError:
            return True
        return self.core.is_attached(self.group_peer) or self.core.is_idle()


class Watcher:
    """Watches ranks that this one waits for to connect, on a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three below
        self._watches: dict[tuple[str, int], Watch] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Look after a rank until its watch is over; to be called when what waits for it has been submitted."""
        with self._changed:
            self._watches.setdefault((watch.name, watch.peer), watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bagua-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # ---- everything below runs on the thread

    def _run(self) -> None:
        while (watches := self._next_round()) is not None:
            for watch in watches:
                self._look(watch)

    def _next_round(self) -> list[Watch] | None:
        """Those to look at, after a pause; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._watches or self._is_closing)
            self._changed.wait_for(lambda: self._is_closing, _POLL_SECONDS)
            # Under the lock, so that a message which is submitted now either finds its watch gone or keeps it.
            self._watches = {key: watch for key, watch in self._watches.items() if not watch.is_over()}
            return None if self._is_closing else list(self._watches.values())

    def _look(self, watch: Watch) -> None:
        def still_wanted() -> None:
            if self._is_closing or watch.is_over():
                raise TimeoutError("nobody waits any more")

        try:
            watch.look(still_wanted)
        except BaguaError as error:
            watch.core.poison(error)
        except Exception as error:  # whatever a peer answers, the thread goes on
            logger.warning("asking rank %d in group '%s' failed: %s", watch.group_peer, watch.name, error)


def gone(record: RankRecord, group_peer: int) -> TransportError:
    """The error of a rank whose listener refuses connections."""
    return TransportError(
        f"rank {group_peer} (process {record.pid}) listens no more at {record.address}:{record.port}: "
        "its process has ended or destroyed its groups (see its log), or a firewall refuses connections, of which "
        "every rank must take some",
        rank=group_peer,
    )

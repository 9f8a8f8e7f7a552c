"""How a rank notices that the peer whose connection it waits for has died, failed, or is in another operation.

Beside the data path. Of two ranks the higher one dials, so the lower one would never hear that its peer has died or
that the group has failed there: it checks at intervals. A collective checks on the thread that runs it (links.py). The
thread that sends and receives messages must not block on a single peer, so the thread "bagua-liveness" checks for it,
and for dials that take long. Connected ranks notice over their control link, in the core (csrc/communicator).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bagua.errors import BaguaError, TransportError
from bagua.net.connector import has_exited
from bagua.net.peer_status import PeerStatus, RegisteredGroup
from bagua.net.rendezvous import RankRecord

__all__ = ["REFUSED_SECONDS", "LivenessCheck", "LivenessMonitor", "exited_error"]

logger = logging.getLogger("bagua")

# A rank listens before the others learn its address, so a refused connection means that its process has exited. If it
# had a reason to, its report arrives within this time (PeerStatus.report).
REFUSED_SECONDS = 0.5
# When the first query is sent: the peer may be in another operation, in which case neither will ever connect
# (Mesh::ask does the same over connections). Later queries come at doubling intervals, up to a fraction of the timeout,
# so that a peer that dies meanwhile is noticed long before the deadline.
_FIRST_QUERY_SECONDS = 0.5
_LONGEST_INTERVAL_SECONDS = 8.0
_INTERVALS_PER_TIMEOUT = 16
_POLL_SECONDS = 0.1


class LivenessCheck:
    """Checks on one peer while this rank waits for it to connect.

    Args:
        peer_status: sends the queries.
        record: the peer's.
        name, registered: the group.
        rank, peer: this rank and the peer, global.
        shares_memory: whether the two do; then the peer's Unix listener shows without a message whether it is running.
        timeout_s: how long the wait may take.
    """

    def __init__(
        self,
        peer_status: PeerStatus,
        record: RankRecord,
        name: str,
        registered: RegisteredGroup,
        rank: int,
        peer: int,
        shares_memory: bool,
        timeout_s: float,
    ):
        self.name, self.core, self.peer = name, registered.core, peer
        self.group_peer = registered.ranks.index(peer)
        self._peer_status, self._record, self._registered = peer_status, record, registered
        self._rank, self._shares_memory = rank, shares_memory
        self._interval = _FIRST_QUERY_SECONDS
        self._longest_interval = min(
            max(timeout_s / _INTERVALS_PER_TIMEOUT, _FIRST_QUERY_SECONDS), _LONGEST_INTERVAL_SECONDS
        )
        self._next_check = self._next_query = time.monotonic() + self._interval
        self._has_refused = False

    def check(self, still_wanted: Callable[[], None]) -> None:
        """Check on the peer if a check is due; `still_wanted` may raise while an answer is awaited.

        Raises:
            TransportError: its process has exited.
            InvalidArgument: it is in another operation.
            RemoteError: the group has failed on the peer.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + REFUSED_SECONDS
        try:
            if self._shares_memory and has_exited(self._record):
                raise ConnectionRefusedError
            if now >= self._next_query:
                self._peer_status.query(self.name, self._registered, self._rank, self.peer, still_wanted)
                self._interval = min(2 * self._interval, self._longest_interval)
                self._next_query = time.monotonic() + self._interval
        except ConnectionRefusedError as error:
            if self._has_refused:
                raise exited_error(self._record, self.group_peer) from error
            self._has_refused = True

    def is_over(self) -> bool:
        """Whether nothing waits for the peer any more: it has connected, or the operations that waited have ended."""
        try:
            self.core.check()
        except BaguaError:
            return True
        return self.core.is_attached(self.group_peer) or self.core.is_idle()


class LivenessMonitor:
    """Runs liveness checks on a thread of its own, which starts with the first of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three below
        self._checks: dict[tuple[str, int], LivenessCheck] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, check: LivenessCheck) -> None:
        """Check on a rank until that is over; to be called after the operation that waits for it was submitted."""
        with self._changed:
            self._checks.setdefault((check.name, check.peer), check)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bagua-liveness", daemon=True)
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
        while (checks := self._next_round()) is not None:
            for check in checks:
                self._run_check(check)

    def _next_round(self) -> list[LivenessCheck] | None:
        """The checks that are not over, after a pause; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._checks or self._is_closing)
            self._changed.wait_for(lambda: self._is_closing, _POLL_SECONDS)
            # Under the lock, so that a message that is submitted now either finds its check removed or keeps it.
            self._checks = {key: check for key, check in self._checks.items() if not check.is_over()}
            return None if self._is_closing else list(self._checks.values())

    def _run_check(self, check: LivenessCheck) -> None:
        def still_wanted() -> None:
            if self._is_closing or check.is_over():
                raise TimeoutError("nobody waits any more")

        try:
            check.check(still_wanted)
        except BaguaError as error:
            check.core.poison(error)
        except Exception as error:  # no answer of a peer may end the thread
            logger.warning("the status query to rank %d in group '%s' failed: %s", check.group_peer, check.name, error)


def exited_error(record: RankRecord, group_peer: int) -> TransportError:
    """The error for a rank whose listener refuses connections: its process has exited."""
    return TransportError(
        f"rank {group_peer} (process {record.pid}) no longer listens at {record.address}:{record.port}: its process "
        "has exited or destroyed its groups (see its log), or a firewall refuses connections between the ranks",
        rank=group_peer,
    )

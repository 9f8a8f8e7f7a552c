"""The outgoing connections of a rank: links to other processes and channels of their groups, made on first use.

Beside the data path. Of two ranks of a group the higher one dials the group's channel; the link between their
processes, which comes first, is dialed by whoever needs it (connector.py knows how, listener.py accepts). Where both
dial at once, the higher rank's connection stands. For each peer to which something is missing there is a thread: a peer
that does not answer delays only groups that wait for it, and those wait in the core, which learns by the
link, or from here, what is the matter.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from bagua import _C
from bagua.errors import BaguaError, TransportError
from bagua.net.connector import Attempt, HostProbe
from bagua.net.exhausted import exhausted_error, start_thread
from bagua.net.rendezvous import RankRecord

__all__ = ["Dialer", "RegisteredGroup", "exited_error"]

_POLL_SECONDS = 0.05
# The part of the time without a connection after which the others are asked whether they reach the host: early enough
# that they find out within it. As of a link that falls silent (ProcessLink::Pace).
_DOUBT_AFTER = 0.8
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # of a host that took the connection
# A rank listens before the others learn its address, so a refused connection means that its process has exited. If it
# had a reason to, its report arrives within this time (reports.py).
_REFUSED_SECONDS = 0.5


@dataclass
class RegisteredGroup:
    """A group of this process whose channels are made on first use."""

    key: str
    core: _C.Group
    ranks: list[int]  # global ranks by group rank
    rank: int  # this process's, global

    @property
    def rank_here(self) -> int:
        """This process's rank in the group."""
        return self.ranks.index(self.rank)

    def dials(self, peer: int) -> bool:
        """Returns True if this rank, of the two, dials the channel."""
        return self.ranks.index(self.rank) > self.ranks.index(peer)


class _UnwantedError(Exception):
    """Nobody needs the connection any more."""


class Dialer:
    """The outgoing connections of one process.

    Args:
        groups: those of this process by key; kept up to date by the owner under `lock`.
        lock, changed: the owner's lock and its condition, which is notified of what the dialing may wait for.
        is_linked: whether there is a link to a rank.
        dial_link: makes one, or returns where the peer's own is about to come.
        dial_channel: makes the channel of a group to a peer.
        silence_s: for how long a host may take no connection before that is a failure: by then the others have reported
            whether they reach it.
        stalled_s: for how long this process itself did not run, a short while ago, in which a rank may have given it
            up; 0 if it did.
    """

    def __init__(
        self,
        groups: dict[str, RegisteredGroup],
        lock: threading.RLock,
        changed: threading.Condition,
        is_linked: Callable[[int], bool],
        dial_link: Callable[[int, Attempt], None],
        dial_channel: Callable[[RegisteredGroup, int, Attempt], None],
        silence_s: float,
        stalled_s: Callable[[int], float],
    ):
        self.records: list[RankRecord] = []
        self._groups, self._lock, self._changed, self._is_linked = groups, lock, changed, is_linked
        self._dial_link, self._dial_channel = dial_link, dial_channel
        self._silence_s, self._stalled_s = silence_s, stalled_s
        # Guarded by the lock: by peer, the keys of groups that need it; and the threads, of those that need more.
        self._wanted: dict[int, set[str]] = defaultdict(set)
        self._threads: dict[int, threading.Thread] = {}
        self._asked: set[int] = set()  # peers of which a group wants to know whether their hosts are still there
        self._is_closing = False

    def want(self, key: str, peer: int) -> None:
        """A group needs a link and a channel to a rank; does not wait for them. Asked again, it wants to know whether
        the rank's host is still there."""
        with self._lock:
            if key in self._wanted[peer]:
                self._asked.add(peer)
            self._wanted[peer].add(key)
            if peer in self._threads or self._is_closing:
                return
            thread = threading.Thread(target=self._run, args=(peer,), name=f"bagua-dial-{peer}", daemon=True)
            group = self._groups.get(key)
            try:
                self._threads[peer] = thread
                start_thread(thread, None if group is None else group.rank_here)
            except BaseException as error:  # Ctrl-C, mostly: it has begun or not, and ends where it is not known
                self._threads.pop(peer, None)
                if isinstance(error.__context__, KeyboardInterrupt):  # of which its wait has made a RuntimeError
                    raise KeyboardInterrupt from None
                raise

    def exhausted(self, error: Exception) -> None:
        """This process has no descriptor or thread left: fail the groups that wait for a connection."""
        with self._lock:
            for peer in list(self._wanted):
                for group in self._missing(peer, False):
                    group.core.poison(_failed(error, group.rank_here))

    def forget(self, key: str) -> None:
        """A group was closed; under the lock."""
        for keys in self._wanted.values():
            keys.discard(key)

    def close(self) -> None:
        """End the threads; nothing is dialed any more."""
        with self._lock:
            self._is_closing = True
            threads = list(self._threads.values())
            self._changed.notify_all()
        for thread in threads:
            thread.join()

    def _missing(self, peer: int, linked: bool) -> list[RegisteredGroup]:
        """The groups for which this rank still has to do something, given whether there is a link; under the lock."""
        if self._is_closing:
            return []
        missing = []
        for key in list(self._wanted[peer]):
            group = self._groups.get(key)
            if group is None or group.core.has_failed or group.core.is_attached(group.ranks.index(peer)):
                self._wanted[peer].discard(key)
            elif not linked or group.dials(peer):
                missing.append(group)
        return missing

    # ---- everything below runs on the peer's thread

    def _run(self, peer: int) -> None:
        state = _PeerState(self.records[peer], self._silence_s, lambda: self._stalled_s(peer))
        while True:
            with self._lock:
                if self._threads.get(peer) is not threading.current_thread():
                    return
                linked = self._is_linked(peer)
                missing = self._missing(peer, linked)
                if not missing:
                    del self._threads[peer]
                    self._asked.discard(peer)
                    return
            try:
                self._advance(peer, linked, missing, state)
            except Exception as error:  # a defect here must not become a group that waits for its deadline
                for group in missing:
                    group.core.poison(error if isinstance(error, BaguaError) else _failed(error, group.rank_here))

    def _advance(self, peer: int, linked: bool, missing: list[RegisteredGroup], state: _PeerState) -> None:
        """One attempt to make the link, or the first of the channels that are missing; then a pause if it failed."""

        def still_wanted() -> None:
            with self._lock:
                left = self._missing(peer, linked)
                is_asked = peer in self._asked
                self._asked.discard(peer)
                # A link belongs to no group: the peer may have its end by now, and would take this one's for a death.
                if self._is_closing or (linked and missing[0] not in left):
                    raise _UnwantedError
            if not linked and not attempt.is_connected and self._is_linked(peer):  # it came the other way
                raise _UnwantedError
            state.note(attempt, left, peer, is_asked)

        attempt = Attempt(still_wanted, self._silence_s)
        try:
            state.note(attempt, missing, peer)
            if linked:
                self._dial_channel(missing[0], peer, attempt)
            else:
                self._dial_link(peer, attempt)
        except _UnwantedError:
            return
        except (OSError, TransportError) as error:
            state.failed(error, attempt, missing, peer)
            time.sleep(_POLL_SECONDS)
        else:
            state.succeeded()
        finally:
            state.end_probe()


class _PeerState:
    """The outcome of the attempts to reach a peer, for the error of the groups that wait for it."""

    def __init__(self, record: RankRecord, silence_s: float, stalled_s: Callable[[], float]):
        self._record, self._silence_s, self._stalled_s = record, silence_s, stalled_s
        self._refused_since: float | None = None
        self._silent_since = time.monotonic()
        self._is_noted = False
        self._is_doubted = False  # the others are being asked about it
        self._probe: HostProbe | None = None

    def succeeded(self) -> None:
        self._refused_since = None
        self._answered()

    def _answered(self) -> None:
        self._silent_since = time.monotonic()
        self._is_doubted = False

    def end_probe(self) -> None:
        """Ends an attempt."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def note(self, attempt: Attempt, missing: list[RegisteredGroup], peer: int, is_asked: bool = False) -> None:
        """While an attempt goes on; has the groups doubt a peer whose host has taken no connection for long. Where they
        ask, a host that took this one is called again: nothing else would show soon that it is down."""
        record = self._record
        if is_asked and attempt.is_connected and self._probe is None:
            self._probe = HostProbe(record)
            self._is_noted = False
        elif self._probe is not None and self._probe.is_answered():
            self.end_probe()
        if attempt.is_connected and self._probe is None:
            self._answered()
            for group in missing:
                group_peer = group.ranks.index(peer)
                what = (
                    f"rank {group_peer} does not answer: its process is stopped or its interpreter is held up (its "
                    f"host accepts connections at {record.address}:{record.port})"
                )
                group.core.note_unreachable(group_peer, what, True)
        elif self._is_doubted or time.monotonic() - self._silent_since > _DOUBT_AFTER * self._silence_s:
            self._doubt(missing, peer, "no answer to the request for a connection")
        elif not self._is_noted:
            self._is_noted = True
            self._note_cut(missing, peer, "no answer to the request for a connection")

    def failed(
        self, error: OSError | TransportError, attempt: Attempt, missing: list[RegisteredGroup], peer: int
    ) -> None:
        """Decides after an attempt that failed."""
        now = time.monotonic()
        if exhausted_error(error, None) is not None:
            for group in missing:
                group.core.poison(_failed(error, group.rank_here))
            return
        if isinstance(error, ConnectionRefusedError):
            self._answered()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > _REFUSED_SECONDS:
                for group in missing:
                    error = exited_error(self._record, group.ranks.index(peer))
                    group.core.poison(_after_a_stall(self._stalled_s(), error, group.rank_here))
            return
        self._refused_since = None
        if isinstance(error, TransportError):  # it listens, but did not accept this connection
            self._answered()
            for group in missing:
                what = f"cannot connect to rank {group.ranks.index(peer)} at {self._where}: {error}"
                group.core.note_unreachable(group.ranks.index(peer), what, True)
        elif (
            self._is_doubted
            or now - self._silent_since > _DOUBT_AFTER * self._silence_s
            or (attempt.is_connected and error.errno in _SILENT)
        ):
            self._doubt(missing, peer, str(error))
        else:
            self._note_cut(missing, peer, str(error))

    @property
    def _where(self) -> str:
        return f"{self._record.address}:{self._record.port}"

    def _cut(self, group: RegisteredGroup, peer: int, why: str) -> str:
        here, there = group.ranks.index(group.rank), group.ranks.index(peer)
        return (
            f"the connection between rank {here} and rank {there} is silent: cannot connect to rank {there} at "
            f"{self._where}: {why} (the network is cut, the host is down, or a firewall is in the way; "
            "BAGUA_SOCKET_IFNAME chooses the interface)"
        )

    def _note_cut(self, missing: list[RegisteredGroup], peer: int, why: str) -> None:
        for group in missing:
            group.core.note_unreachable(group.ranks.index(peer), self._cut(group, peer, why), False)

    def _doubt(self, missing: list[RegisteredGroup], peer: int, why: str) -> None:
        self._is_doubted = True
        silence_s = time.monotonic() - self._silent_since
        for group in missing:
            group.core.doubt_unlinked(group.ranks.index(peer), silence_s, self._cut(group, peer, why))


def exited_error(record: RankRecord, group_peer: int) -> TransportError:
    """The error for a rank whose listener refuses connections: its process has exited."""
    return TransportError(
        f"rank {group_peer} (process {record.pid}) no longer listens at {record.address}:{record.port}: its process "
        "has exited or destroyed its groups (see its log), or a firewall refuses connections between the ranks",
        rank=group_peer,
    )


def _after_a_stall(seconds: float, error: TransportError, rank: int) -> TransportError:
    """The error itself, or the one for a rank that its peers have given up meanwhile: this one."""
    if seconds == 0:
        return error
    return TransportError(
        f"this rank did not run for {seconds:.3g} s (its process was stopped, or its interpreter was held up), for "
        f"which the others may have left: {error}",
        rank=rank,
    )


def _failed(error: Exception, rank: int) -> TransportError:
    exhausted = exhausted_error(error, rank, "connect to others")
    return exhausted or TransportError(f"a connection could not be made, because of {error!r}", rank=rank)

"""The connections of this process: links to the processes of other ranks, and the channels of their common groups.

One Endpoint per process: a TCP socket and an abstract Unix socket that listen (nothing is left behind after kill -9),
the thread that serves them (listener.py), and the threads that dial (dialer.py). What is made goes to the core:

link:      one connection for each pair of processes, for all of their groups: heartbeats, failures, who waits for
           whom, shared segments. Over the Unix socket on one host, over TCP otherwise.
channel:   what moves a group's messages to a peer, made on first use.
           Same host:    a pair of rings; the dialer passes its descriptor and that of its doorbell over a Unix socket,
                         and the acceptor answers with its own doorbell.
           Other hosts:  `tcp_streams` TCP connections, which belong together by a random id.
           torch:        one TCP connection to agree on a tag; torch moves the data (torch_transport.py).

A channel to a group that this rank has not made yet waits until it does, or the time for setting up is over, or its
dialer has left. Who still needs one then dials again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import resource
import secrets
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from bagua import _C
from bagua.config import Settings
from bagua.errors import BaguaError, InternalError, TransportError
from bagua.net import congestion, reports
from bagua.net.auth import Credentials
from bagua.net.connector import Attempt, dial_link, dial_tcp, dial_unix
from bagua.net.dialer import Dialer, RegisteredGroup
from bagua.net.exhausted import exhausted_error
from bagua.net.fork_guard import close_in_child
from bagua.net.interfaces import InterfaceAddress, with_scope
from bagua.net.listener import IncomingChannel, Listener, close_all
from bagua.net.rendezvous import RankRecord
from bagua.net.stall_watch import StallWatch
from bagua.net.torch_transport import TorchTransport

__all__ = ["Endpoint"]

logger = logging.getLogger("bagua")

# A link that a peer has promised to dial comes within this time, or is dialed again.
_PROMISE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_MAX_INCOMING = 10_000
# The device transport of each backend.
_DEVICE_TRANSPORTS = {"auto": "auto", "native": "staged", "nccl": "nccl", "torch": "staged"}


class Endpoint:
    """This process as other ranks reach it: its listening sockets, and its links and channels to them.

    Args:
        settings: transport settings.
        address: where to listen for TCP.
        torch_transport: moves the data of all ranks, with backend="torch".
    """

    def __init__(self, settings: Settings, address: InterfaceAddress, torch_transport: TorchTransport | None = None):
        if torch_transport is not None:
            settings = replace(settings, shared_memory=False, tcp_streams=0)
        if settings.tcp_streams > 0:
            congestion.check(settings.tcp_congestion)
        self.settings = settings
        self._torch = torch_transport
        self.address = address
        self.records: list[RankRecord] = []
        self.credentials: Credentials
        self._rank = -1
        self._process = _C.Process(settings.heartbeat_timeout_s)
        self._groups: dict[str, RegisteredGroup] = {}
        self._num_opened: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._incoming: dict[tuple[str, int], IncomingChannel] = {}  # (group's key, dialer's global rank)
        self._incoming_s = self._started_at = 0.0
        self._has_warned = False  # that descriptors run out
        self._dialing: set[int] = set()  # peers to which this rank is dialing a link
        self._early = reports.EarlyReports()
        # Guards the five above. Taken by itself, not by the condition's `with`, which is a function in Python: Ctrl-C
        # in the middle of that leaves the lock held, and the threads, for which close() waits, wait for it forever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # announces what is attached
        self._dialer = Dialer(
            self._groups,
            self._lock,
            self._changed,
            self._process.is_linked,
            self._dial_link,
            self._dial_channel,
            settings.heartbeat_timeout_s,
            self._stalled_s,
        )
        self._listener: Listener | None = None
        self._failure: Exception | None = None  # of the listener's thread; guarded by the same lock
        self._sockets: list[socket.socket] = []
        tcp = self._listen(address.family, _bindable(address))
        self.port: int = tcp.getsockname()[1]
        self.unix_name = f"bagua-{os.getpid()}-{secrets.token_hex(8)}" if settings.shared_memory else ""
        if self.unix_name:
            self._listen(socket.AF_UNIX, "\0" + self.unix_name)
        try:
            self._stall_watch = StallWatch(settings.heartbeat_timeout_s)
        except TransportError:
            for sock in self._sockets:
                sock.close()
            self._process.close()
            raise

    def _listen(self, family: int, address: object) -> socket.socket:
        sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
        self._sockets.append(sock)
        sock.bind(address)
        sock.listen(1024)
        return sock

    def start(self, records: list[RankRecord], credentials: Credentials, timeout_s: float) -> None:
        """Begin to accept; called once, when the table of ranks and the key of the rendezvous are known.

        Args:
            timeout_s: for how long a channel may wait for its group to be made here.
        """
        # The scope of a link-local address is each host's own: this one reaches it where it listens itself.
        scope = self.address.interface
        records = [replace(record, address=with_scope(record.address, scope)) for record in records]
        self.records = self._dialer.records = records
        self.credentials, self._rank = credentials, credentials.rank
        self._incoming_s = timeout_s
        self._started_at = time.monotonic()
        self._listener = Listener(
            self._sockets,
            credentials,
            self._accepted,
            self._listener_failed,
            self._dialer.exhausted,
            self._works,
            self._close_unclaimed,
        )

    def close(self) -> None:
        """Stop dialing and accepting, say goodbye, and close everything that was not passed to a group."""
        self._dialer.close()
        self._stall_watch.close()
        if self._listener is not None:
            self._listener.close()
        for sock in self._sockets:
            sock.close()
        with self._lock:
            for channel in self._incoming.values():
                channel.close()
            self._incoming.clear()
        self._process.close()
        if self._torch is not None:
            self._torch.close()

    # ---- groups

    def open_core(self, name: str, ranks: list[int], rank: int) -> _C.Group:
        """The core of a group of the global ranks `ranks`, of which this process is `rank` (global).

        Its channels are made on first use; from now on peers can connect to it.
        """
        same_host = [peer == rank or self.share_memory(rank, peer) for peer in ranks]
        spin_us = self.settings.spin_us
        if spin_us is None:
            # Polling pays while every rank of this host can have a CPU core of its own; otherwise it takes the peer's.
            spin_us = 50.0 if sum(same_host) <= len(os.sched_getaffinity(0)) else 2.0
        key = self._key(name, ranks)
        if not self._has_warned and not _has_descriptors_to_spare():
            self._has_warned = True
            warnings.warn(
                f"more than half of `ulimit -n` is in use, and {len(self._groups)} groups of bagua's are open, which "
                "hold file descriptors and threads; destroy those that are not used any more "
                "(destroy_process_group(group)): dropping one does not close it",
                ResourceWarning,
                stacklevel=2,
            )

        def connect(peer: int) -> None:
            self._dialer.want(key, ranks[peer])

        thresholds = self.settings.thresholds
        way = _DEVICE_TRANSPORTS[self.settings.backend]
        core = _C.Group(
            name, key, ranks.index(rank), ranks, spin_us, same_host, thresholds, connect, self._process, way
        )
        with self._lock:
            self._num_opened[name, tuple(ranks)] += 1
            if self._failure is not None:
                core.poison(_not_accepting(self._failure, ranks.index(rank)))
            group = self._groups[key] = RegisteredGroup(key, core, ranks, rank)
            if (early := self._early.take(key)) is not None:
                try:
                    self._fail_with_report(group, *early)
                except Exception as error:  # nothing that a peer sends may end this rank
                    logger.warning("the report of rank %d on group '%s' is none: %r", early[1], key, error)
            for _, peer in [known for known in self._incoming if known[0] == key]:
                self._attach_if_complete(key, peer)
        return core

    def _key(self, name: str, ranks: list[int]) -> str:
        """Returns the members' key of the group: its name may be used again, and by other ranks."""
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        with self._lock:
            return f"{name}|{members}|{self._num_opened[name, tuple(ranks)] + 1}"

    def close_core(self, core: _C.Group) -> None:
        """End the core's worker thread and announce the shutdown to the peers."""
        key = core.key
        with self._lock:
            self._groups.pop(key, None)
            self._dialer.forget(key)
            self._changed.notify_all()
        try:
            if self._torch is not None:
                self._torch.flush(key, core)
        finally:
            core.close()
            if self._torch is not None:
                self._torch.join(key)

    def report(self, cores: list[_C.Group]) -> None:
        """Called before the cores of a group are closed: if one has failed, tell ranks that have no link why."""
        causes = [cause for core in cores if (cause := reports.cause_of(core)) is not None]
        groups = [group for core in cores if (group := self._groups.get(core.key)) is not None]
        if not causes or not groups:
            return
        ranks = groups[0].ranks
        peers = [ranks[peer] for peer in reports.targets(ranks.index(self._rank), len(ranks))]
        about = {
            "purpose": "report",
            "groups": [group.key for group in groups],
            "from": self._rank,
            "cause": reports.describe(causes[0]),
        }
        unlinked = [self.records[peer] for peer in peers if not self._process.is_linked(peer)]
        reports.report(unlinked, self.credentials, about, time.monotonic() - self._started_at)

    def share_memory(self, rank: int, peer: int) -> bool:
        """Returns True if two ranks (global) are on one host and both have shared memory switched on."""
        mine, theirs = self.records[rank], self.records[peer]
        return mine.host == theirs.host and bool(mine.unix_name) and bool(theirs.unix_name)

    def same_node(self, rank: int, peer: int) -> bool:
        """Returns True if two ranks (global) are on one host."""
        return self.records[rank].host == self.records[peer].host

    # ---- dialing, on the dialer's threads

    def _stalled_s(self, peer: int) -> float:
        """Returns the seconds of a recent stall of this process, of a peer without a link; a link outlasts a stall."""
        return 0.0 if self._process.had_link(peer) else self._stall_watch.recent_s()

    def _dial_link(self, peer: int, attempt: Attempt) -> None:
        with self._lock:
            if self._process.is_linked(peer):
                return
            self._dialing.add(peer)
        try:
            about = {"purpose": "link", "from": self._rank, "to": peer}
            over_unix = self.share_memory(self._rank, peer)
            sock = dial_link(self.records[peer], self.credentials, about, over_unix, attempt)
            if sock is not None:
                self._process.attach(peer, sock.detach())
        finally:
            with self._lock:
                self._dialing.discard(peer)
                for key, rank in [known for known in self._incoming if known[1] == peer]:
                    self._attach_if_complete(key, rank)
        if sock is None:
            self._await_link(peer, attempt)

    def _await_link(self, peer: int, attempt: Attempt) -> None:
        """The peer has one, or is about to dial it."""
        deadline = time.monotonic() + _PROMISE_SECONDS
        while not self._process.is_linked(peer) and time.monotonic() < deadline:
            attempt.still_wanted()
            with self._lock:
                self._changed.wait(_POLL_SECONDS)

    def _dial_channel(self, group: RegisteredGroup, peer: int, attempt: Attempt) -> None:
        if self.share_memory(self._rank, peer):
            self._dial_rings(group, peer, attempt)
        else:
            self._dial_streams(group, peer, attempt)

    def _about(self, key: str, peer: int, channel: str, index: int, streams: int = 0, tag: int = 0) -> dict:
        return {
            "purpose": "channel",
            "group": key,
            "from": self._rank,
            "to": peer,
            "channel": channel,
            "index": index,
            "streams": streams,
            "ring_bytes": self.settings.shm_ring_bytes,
            "tag": tag,
        }

    def _dial_rings(self, group: RegisteredGroup, peer: int, attempt: Attempt) -> None:
        ring_bytes, core = self.settings.shm_ring_bytes, group.core
        about = self._about(group.key, peer, secrets.token_hex(8), 0)
        try:
            rings = _C.create_sealed_memory("bagua-rings", _C.shm_segment_bytes(ring_bytes))
        except TransportError as error:  # of this rank, not of the peer
            raise OSError(errno.EMFILE, str(error)) from error
        try:
            doorbell = dial_unix(self.records[peer], self.credentials, about, [rings, core.doorbell_fd()], attempt)
        except BaseException:
            os.close(rings)
            raise
        with _promised(group):
            core.attach_shm(group.ranks.index(peer), rings, ring_bytes, True, doorbell)

    def _dial_streams(self, group: RegisteredGroup, peer: int, attempt: Attempt) -> None:
        channel = secrets.token_hex(8)
        tag = self._torch.next_tag() if self._torch is not None else 0
        streams = self.settings.tcp_streams
        if streams > 1 and not _has_descriptors_to_spare():
            streams = 1
        abouts = [self._about(group.key, peer, channel, index, streams, tag) for index in range(max(1, streams))]
        sockets = dial_tcp(self.records[peer], self.credentials, abouts, attempt)
        with _promised(group):
            self._attach_streams(group, peer, sockets, tag)

    def _attach_streams(self, group: RegisteredGroup, peer: int, sockets: list[socket.socket], tag: int) -> None:
        group_peer = group.ranks.index(peer)
        if self._torch is not None:
            close_all(sockets, [])
            self._torch.attach(group.key, group.core, group_peer, peer, tag)
            return
        for sock in sockets:
            congestion.choose(sock, self.settings.tcp_congestion)
        group.core.attach_tcp(group_peer, [sock.detach() for sock in sockets])

    # ---- accepting: on the listener's thread, and in open_core for channels that came before the group was made

    def _accepted(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        accept = {"link": self._accept_link, "report": self._accept_report, "channel": self._accept_channel}
        try:
            purpose = about.get("purpose")
            if not isinstance(purpose, str) or purpose not in accept:
                raise TransportError(f"its purpose is {purpose!r}, expected one of {', '.join(accept)}")
            accept[purpose](sock, about, descriptors)
        except BaseException:
            close_all([sock], descriptors)
            raise

    def _accept_link(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        peer = about["from"]
        with self._lock:
            if self._process.is_linked(peer) or (peer in self._dialing and self._rank > peer):
                sock.sendall(b"W")
                sock.close()
                return
            sock.sendall(b"A")
            self._process.attach(peer, sock.detach())
            for key, rank in [known for known in self._incoming if known[1] == peer]:
                self._attach_if_complete(key, rank)
            self._changed.notify_all()

    def _accept_report(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        sock.close()
        with self._lock:
            for key in about["groups"]:
                group = self._groups.get(key)
                if group is None:
                    self._early.add(key, about["cause"], about["from"])
                else:
                    self._fail_with_report(group, about["cause"], about["from"])

    def _fail_with_report(self, group: RegisteredGroup, cause: dict, teller: int) -> None:
        group.core.poison(reports.remote_error(cause, group.ranks.index(teller)))

    def _accept_channel(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        announced = IncomingChannel.announced(about, bool(descriptors))
        key, peer, index = about["group"], about["from"], about["index"]
        if self._process.has_failed(key):
            close_all([sock], descriptors)
            return
        with self._lock:
            channel = self._incoming.get((key, peer))
            if channel is None or channel.id != announced.id or index in channel.sockets:
                if channel is not None:
                    channel.close()  # the dialer has abandoned that attempt
                elif len(self._incoming) >= _MAX_INCOMING:
                    raise TransportError(f"{_MAX_INCOMING} channels wait for groups that are not made here")
                channel = self._incoming[key, peer] = announced
            channel.sockets[index] = sock
            if descriptors:
                close_all([], channel.descriptors)
                channel.descriptors = descriptors
            self._attach_if_complete(key, peer)

    def _close_unclaimed(self) -> bool:
        """Let go of channels whose group has not come in time, or whose dialer has left; whether others wait."""
        before = time.monotonic() - self._incoming_s
        with self._lock:
            dialers = {dialer for _, dialer in self._incoming}
        left = {dialer for dialer in dialers if self._has_left(dialer)}
        with self._lock:
            late = [known for known, channel in self._incoming.items() if channel.since < before]
            for known in [*self._incoming]:
                if known in late or known[1] in left:
                    with contextlib.suppress(OSError):  # of a close: it is closed all the same
                        self._incoming.pop(known).close()
            is_waiting = bool(self._incoming)
        if late:
            logger.warning(
                "closed %d connections for groups that were not made here within %g s, such as rank %d's for '%s'; all "
                "ranks call new_group, in the same order",
                len(late),
                self._incoming_s,
                late[0][1],
                late[0][0].partition("|")[0],
            )
        return is_waiting

    def _has_left(self, peer: int) -> bool:
        return self._process.had_link(peer) and not self._process.is_linked(peer)

    def _works(self) -> bool:
        with self._lock:
            return bool(self._groups) and not any(group.core.has_failed for group in self._groups.values())

    def _listener_failed(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
            for group in self._groups.values():
                group.core.poison(_not_accepting(error, group.rank_here))

    def _attach_if_complete(self, key: str, peer: int) -> None:
        """A channel, under the lock, waits for its group, for its other connections and for the link."""
        group = self._groups.get(key)
        if group is None or not self._incoming[key, peer].is_complete or not self._process.is_linked(peer):
            return
        channel = self._incoming.pop((key, peer))
        try:
            self._attach(group, peer, channel)
        except Exception as error:  # nothing that a peer sends may end this rank
            logger.warning("the connection of rank %d to group '%s' failed: %s", peer, key, error)
        finally:
            channel.close()
        self._changed.notify_all()

    def _attach(self, group: RegisteredGroup, peer: int, channel: IncomingChannel) -> None:
        """Answer the dialer and pass the channel to the core; what stays in `channel` the caller closes."""
        core, group_peer = group.core, group.ranks.index(peer)
        if core.is_attached(group_peer):
            raise TransportError(f"rank {group_peer} is connected already")
        first = channel.sockets[0]
        if channel.descriptors:
            sizes = _C.shm_segment_bytes(channel.ring_bytes), _C.DOORBELL_BYTES
            for fd, size in zip(channel.descriptors, sizes, strict=True):
                _C.expect_sealed_memory(fd, size)
            socket.send_fds(first, [b"D"], [core.doorbell_fd()])
            passed, channel.descriptors = channel.descriptors, []
        else:
            first.sendall(b"A")
            passed = []
        with _promised(group):
            if passed:
                rings, doorbell = passed
                core.attach_shm(group_peer, rings, channel.ring_bytes, False, doorbell)
            else:
                self._attach_streams(group, peer, [channel.sockets[i] for i in sorted(channel.sockets)], channel.tag)


@contextlib.contextmanager
def _promised(group: RegisteredGroup) -> Iterator[None]:
    """The peer believes that it is connected: an error of the block fails the group."""
    try:
        yield
    except (BaguaError, RuntimeError) as error:
        exhausted = exhausted_error(error, group.rank_here, "connect to others")
        if isinstance(error, BaguaError) or exhausted is not None:
            group.core.poison(exhausted or error)
        raise


def _not_accepting(error: Exception, rank: int) -> BaguaError:
    exhausted = exhausted_error(error, rank, "accept connections")
    return exhausted or InternalError(f"a rank no longer accepts connections, because of {error!r}; see its log")


def _has_descriptors_to_spare() -> bool:
    """Returns True if less than half of the descriptors are in use: the rest is for more groups."""
    return 2 * len(os.listdir("/proc/self/fd")) < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _bindable(address: InterfaceAddress) -> tuple:
    host = address.address
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]

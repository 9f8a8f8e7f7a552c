"""Opens, authenticates and hands over the connections between ranks; the core moves the bytes from there.

One Endpoint per process: a TCP listener, an abstract Unix listener (nothing is left behind after kill -9) and the
thread that serves them (listener.py). Of two ranks of a group the higher one dials (connector.py; the core knows this
rule too: Mesh::awaits_dial). A connection for a group that this rank has not made yet waits until it does.

Same host:    one Unix socket (the control link); the dialer passes the descriptors of a pair of rings and of its
              doorbell, the acceptor answers with its own doorbell.
Other hosts:  one TCP connection for control and `tcp_streams` for data, which belong together by a random link id.
torch:        one TCP connection for control, on any host; torch moves the data (torch_transport.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import replace
from typing import NoReturn

from bagua import _C
from bagua.config import Settings
from bagua.errors import Aborted, InternalError, TransportError
from bagua.net import congestion
from bagua.net.connector import Patience, dial_tcp, dial_unix
from bagua.net.fork_guard import close_in_child
from bagua.net.interfaces import InterfaceAddress
from bagua.net.listener import Acceptor, Arrival, close_all
from bagua.net.liveness import REFUSED_SECONDS, Watch, Watcher, gone
from bagua.net.peer_status import Questions, Registered
from bagua.net.rendezvous import RankRecord
from bagua.net.torch_transport import TorchTransport

__all__ = ["Endpoint"]

logger = logging.getLogger("bagua")

_POLL_SECONDS = 0.05
# Who dials for so long asks too how the peer is, so that it can tell those that wait for it.
_WATCHED_AFTER_SECONDS = 0.5
_DOORBELL_BYTES = 64  # csrc/common/doorbell.h


class Endpoint:
    """The listening sockets of this process and the way to the other ranks.

    Args:
        settings: transport settings.
        address: where to listen for TCP.
        torch_transport: what moves the data of all ranks, if torch does.
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
        self.secret = b""
        self._groups: dict[str, Registered] = {}
        self._arrivals: dict[tuple[str, int], Arrival] = {}  # (group, dialer's global rank)
        self._changed = threading.Condition()  # guards the two above and announces attachments
        self._acceptor: Acceptor | None = None
        self._failure: InternalError | None = None  # of the acceptor's thread; guarded by the same lock
        self._process = _C.ProcessWaits()
        self._questions = Questions([], b"", self._groups, self._process)
        self._watcher = Watcher()
        self._listeners: list[socket.socket] = []
        tcp = self._listen(address.family, _bindable(address))
        self.port: int = tcp.getsockname()[1]
        self.unix_name = f"bagua-{os.getpid()}-{secrets.token_hex(8)}" if settings.shared_memory else ""
        if self.unix_name:
            self._listen(socket.AF_UNIX, "\0" + self.unix_name)

    def _listen(self, family: int, address: object) -> socket.socket:
        listener = close_in_child(socket.socket(family, socket.SOCK_STREAM))
        self._listeners.append(listener)
        listener.bind(address)
        listener.listen(1024)
        return listener

    def start(self, records: list[RankRecord], secret: bytes) -> None:
        """Begin to accept; called once, when the rank table and the secret are known."""
        self.records, self.secret = records, secret
        self._questions = Questions(records, secret, self._groups, self._process)
        self._acceptor = Acceptor(self._listeners, secret, self._arrived, self._accepts_no_more)

    def close(self) -> None:
        """Stop accepting and close everything that was not handed to a group."""
        self._watcher.close()
        if self._acceptor is not None:
            self._acceptor.close()
        for listener in self._listeners:
            listener.close()
        with self._changed:
            for arrival in self._arrivals.values():
                arrival.close()
            self._arrivals.clear()
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
            # Polling pays while every rank of this host can have a core of its own; otherwise it takes the peer's.
            spin_us = 50.0 if sum(same_host) <= len(os.sched_getaffinity(0)) else 2.0

        def connect(peer: int, left_s: float, timeout_s: float) -> None:
            self._connect(name, rank, ranks[peer], left_s, timeout_s)

        thresholds = self.settings.thresholds
        core = _C.Group(name, ranks.index(rank), ranks, spin_us, same_host, thresholds, connect, self._process)
        with self._changed:
            if self._failure is not None:
                core.poison(self._failure)
            self._groups[name] = Registered(core, ranks)
            self._questions.begin(name)
            for group, peer in [key for key in self._arrivals if key[0] == name]:
                self._attach_if_complete(group, peer)
        return core

    def close_core(self, name: str, core: _C.Group) -> None:
        """End the core's worker and say goodbye to the peers."""
        with self._changed:
            self._questions.end(name)
            self._groups.pop(name, None)
            self._changed.notify_all()
        try:
            if self._torch is not None:
                self._torch.flush(name, core)
        finally:
            core.close()
            if self._torch is not None:
                self._torch.join(name)

    def report(self, names: list[str], rank: int) -> None:
        """Before the cores of these names are closed: if one has failed, tell why to ranks that are not connected."""
        self._questions.report(names, rank)
        with self._changed:
            for group, peer in [key for key in self._arrivals if self._questions.has_ended(key[0])]:
                self._arrivals.pop((group, peer)).close()

    def share_memory(self, rank: int, peer: int) -> bool:
        """Whether two ranks (global) are on one host and both have shared memory switched on."""
        mine, theirs = self.records[rank], self.records[peer]
        return mine.host == theirs.host and bool(mine.unix_name) and bool(theirs.unix_name)

    def same_node(self, rank: int, peer: int) -> bool:
        """Whether two ranks (global) are on one host."""
        return self.records[rank].host == self.records[peer].host

    def _connect(self, name: str, rank: int, peer: int, left_s: float, timeout_s: float) -> None:
        """Make sure that the group has a channel to `peer`; `rank` and `peer` are global.

        Called by the thread that runs the group's operation: its worker, or the one that called. `timeout_s` is what
        the operation was allowed, of which `left_s` are left.

        Raises:
            DeadlineExceeded: the peer cannot be reached, or (when it has to dial) has not come.
            TransportError: its process has ended.
        """
        registered = self._groups.get(name)
        if registered is None:
            raise Aborted(f"the group '{name}' was destroyed")
        group_peer = registered.ranks.index(peer)

        def still_wanted() -> None:
            registered.core.check()
            if name not in self._groups:
                raise Aborted(
                    f"the group '{name}' was destroyed while it waited for rank {group_peer}", rank=group_peer
                )

        deadline = time.monotonic() + left_s
        if registered.ranks.index(rank) < group_peer:
            self._await_dial(name, registered, rank, peer, timeout_s, Patience(deadline, still_wanted))
            return
        watched_from = time.monotonic() + _WATCHED_AFTER_SECONDS
        is_watched = False

        def still_dialing() -> None:
            nonlocal is_watched
            still_wanted()
            if not is_watched and time.monotonic() > watched_from:
                is_watched = True
                self.watch(name, rank, peer, timeout_s)

        self._dial_until(name, registered, rank, peer, timeout_s, Patience(deadline, still_dialing))

    def _await_dial(
        self, name: str, registered: Registered, rank: int, peer: int, timeout_s: float, patience: Patience
    ) -> None:
        watch = self._watch(name, registered, rank, peer, timeout_s)
        while not self._wait_for_attachment(registered.core, watch.group_peer):
            patience.still_wanted()
            if time.monotonic() > patience.deadline:
                self._raise_late(name, registered, rank, peer, timeout_s, patience)
            watch.look(patience.still_wanted)

    def _watch(self, name: str, registered: Registered, rank: int, peer: int, timeout_s: float) -> Watch:
        shares_memory = self.share_memory(rank, peer)
        return Watch(self._questions, self.records[peer], name, registered, rank, peer, shares_memory, timeout_s)

    def watch(self, name: str, rank: int, peer: int, timeout_s: float) -> None:
        """A group waits for `peer` (`rank` and `peer` are global): fail it if the peer will not connect."""
        registered = self._groups.get(name)
        if registered is not None:
            self._watcher.add(self._watch(name, registered, rank, peer, timeout_s))

    def _raise_late(
        self, name: str, registered: Registered, rank: int, peer: int, timeout_s: float, patience: Patience
    ) -> NoReturn:
        """Find out whom to name for a connection that has not come (Mesh::blame)."""
        core, group_peer = registered.core, registered.ranks.index(peer)
        seconds = core.answer_grace_seconds(timeout_s)

        def ask() -> None:
            try:
                answers = self._questions.ask(name, registered, rank, peer, patience.still_wanted, seconds)
            except ConnectionRefusedError as error:
                raise gone(self.records[peer], group_peer) from error
            if not answers:
                self._check_host(registered, rank, peer, timeout_s)

        core.blame(group_peer, timeout_s, ask)
        raise AssertionError("blame always raises")

    def _check_host(self, registered: Registered, rank: int, peer: int, timeout_s: float) -> None:
        """Raise if the kernel of a silent rank's host takes no connection: no sign that the process is to blame."""
        record, core = self.records[peer], registered.core
        if self.share_memory(rank, peer):
            return
        try:
            address = (record.address, record.port)
            socket.create_connection(address, core.answer_grace_seconds(timeout_s)).close()
        except ConnectionRefusedError:  # that comes from there, too
            return
        except OSError as error:
            here, there = registered.ranks.index(rank), registered.ranks.index(peer)
            what = (
                f"the connection between rank {here} and rank {there} is silent: cannot connect to rank {there} at "
                f"{record.address}:{record.port}: {error} (the link is cut, a host is down, or a firewall is in the "
                "way; BAGUA_SOCKET_IFNAME chooses the interface)"
            )
            core.throw_late(-1, what, timeout_s)

    def _wait_for_attachment(self, core: _C.Group, group_peer: int) -> bool:
        """Whether the peer has connected; waits a moment if not."""
        with self._changed:
            if core.is_attached(group_peer):
                return True
            self._changed.wait(_POLL_SECONDS)
            return core.is_attached(group_peer)

    # ---- dialing

    def _dial_until(
        self, name: str, registered: Registered, rank: int, peer: int, timeout_s: float, patience: Patience
    ) -> None:
        record, group_peer = self.records[peer], registered.ranks.index(peer)
        dial = self._dial_unix if self.share_memory(rank, peer) else self._dial_tcp
        refused_since: float | None = None
        while True:
            try:
                dial(name, registered.core, rank, peer, group_peer, patience)
                return
            except (OSError, TransportError) as error:
                patience.still_wanted()
                if isinstance(error, TransportError):  # it listens, but does not want this connection (any more)
                    with contextlib.suppress(ConnectionRefusedError):
                        self._questions.ask(name, registered, rank, peer, patience.still_wanted)
                now = time.monotonic()
                refused_since = (refused_since or now) if isinstance(error, ConnectionRefusedError) else None
                if refused_since is not None and now - refused_since > REFUSED_SECONDS:
                    raise gone(self.records[peer], group_peer) from error
                if now > patience.deadline - _POLL_SECONDS:
                    if isinstance(error, TransportError):  # it is there: it may itself be kept waiting
                        self._raise_late(name, registered, rank, peer, timeout_s, patience)
                    self._check_host(registered, rank, peer, timeout_s)
                    what = (
                        f"cannot connect to rank {group_peer} at {record.address}:{record.port}: {error}; check that "
                        "its process runs and that no firewall is in the way, or choose the interface with "
                        "BAGUA_SOCKET_IFNAME"
                    )
                    registered.core.throw_late(group_peer, what, timeout_s)
            time.sleep(_POLL_SECONDS)

    def _about(self, name: str, rank: int, peer: int, link: str, index: int, tag: int = 0) -> dict:
        return {
            "group": name,
            "from": rank,
            "to": peer,
            "link": link,
            "index": index,
            "streams": self.settings.tcp_streams,
            "ring_bytes": self.settings.shm_ring_bytes,
            "tag": tag,
        }

    def _dial_unix(self, name: str, core: _C.Group, rank: int, peer: int, group_peer: int, patience: Patience) -> None:
        ring_bytes = self.settings.shm_ring_bytes
        about = self._about(name, rank, peer, secrets.token_hex(8), 0)
        rings = os.memfd_create("bagua-rings", os.MFD_CLOEXEC)
        try:
            os.ftruncate(rings, _C.shm_segment_bytes(ring_bytes))
            sock, doorbell = dial_unix(self.records[peer], self.secret, about, [rings, core.doorbell_fd()], patience)
        except BaseException:
            os.close(rings)
            raise
        core.attach_shm(group_peer, sock.detach(), rings, ring_bytes, True, doorbell)

    def _dial_tcp(self, name: str, core: _C.Group, rank: int, peer: int, group_peer: int, patience: Patience) -> None:
        link = secrets.token_hex(8)
        tag = self._torch.next_tag() if self._torch is not None else 0
        abouts = [self._about(name, rank, peer, link, index, tag) for index in range(1 + self.settings.tcp_streams)]
        sockets = dial_tcp(self.records[peer], self.secret, abouts, patience)
        self._attach_tcp(name, core, group_peer, peer, sockets, tag)

    def _attach_tcp(
        self, name: str, core: _C.Group, group_peer: int, peer: int, sockets: list[socket.socket], tag: int
    ) -> None:
        for sock in sockets[1:]:
            congestion.choose(sock, self.settings.tcp_congestion)
        control, *data = [sock.detach() for sock in sockets]
        if self._torch is not None:
            self._torch.attach(name, core, group_peer, peer, control, tag)
        else:
            core.attach_tcp(group_peer, control, data)

    # ---- accepting: on the acceptor's thread, and in open_core for what came before the group

    def _arrived(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        if self._questions.is_one(about):
            close_all([], descriptors)
            self._questions.take(sock, about)
            return
        try:
            announced = Arrival.announced(about, len(self.records), bool(descriptors))
        except BaseException:
            close_all([sock], descriptors)
            raise
        group, peer, index = about["group"], about["from"], about["index"]
        if self._questions.has_ended(group):
            close_all([sock], descriptors)
            return
        with self._changed:
            arrival = self._arrivals.get((group, peer))
            if arrival is None or arrival.link != announced.link or index in arrival.sockets:
                if arrival is not None:
                    arrival.close()  # the dialer gave that attempt up
                arrival = self._arrivals[group, peer] = announced
            arrival.sockets[index] = sock
            if descriptors:
                close_all([], arrival.descriptors)
                arrival.descriptors = descriptors
            self._attach_if_complete(group, peer)

    def _accepts_no_more(self, error: Exception) -> None:
        with self._changed:
            self._failure = InternalError(f"a rank takes no connections any more, because of {error!r}; see its log")
            for registered in self._groups.values():
                registered.core.poison(self._failure)

    def _attach_if_complete(self, group: str, peer: int) -> None:
        registered = self._groups.get(group)
        if registered is None or not self._arrivals[group, peer].is_complete:
            return
        arrival = self._arrivals.pop((group, peer))
        try:
            self._attach(group, registered, peer, arrival)
        except Exception as error:  # whatever a peer brings, this rank goes on
            logger.warning("the connection of rank %d to group '%s' failed: %s", peer, group, error)
        finally:
            arrival.close()
        self._changed.notify_all()

    def _attach(self, name: str, registered: Registered, peer: int, arrival: Arrival) -> None:
        """Answer the dialer and hand the connection to the core; what stays in `arrival` the caller closes."""
        core, group_peer = registered.core, registered.ranks.index(peer)
        if core.is_attached(group_peer):
            raise TransportError(f"rank {group_peer} is connected already")
        control = arrival.sockets[0]
        if arrival.descriptors:
            sizes = _C.shm_segment_bytes(arrival.ring_bytes), _DOORBELL_BYTES
            for fd, size in zip(arrival.descriptors, sizes, strict=True):
                if os.fstat(fd).st_size < size:  # to touch it would be the end of this process
                    raise TransportError(f"it brought {os.fstat(fd).st_size} bytes of shared memory, expected {size}")
            socket.send_fds(control, [b"D"], [core.doorbell_fd()])
            rings, doorbell = arrival.descriptors
            arrival.descriptors = []
            core.attach_shm(group_peer, control.detach(), rings, arrival.ring_bytes, False, doorbell)
        else:
            control.sendall(b"A")
            sockets = [arrival.sockets[index] for index in range(1 + arrival.streams)]
            self._attach_tcp(name, core, group_peer, peer, sockets, arrival.tag)


def _bindable(address: InterfaceAddress) -> tuple:
    host = address.address
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]

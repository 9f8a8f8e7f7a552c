"""Opens the links between ranks, over shared memory, TCP or torch, and passes them to the core, which moves the bytes.

One Endpoint per process: a TCP socket and an abstract Unix socket that listen (nothing is left behind after kill -9),
and the thread that serves them (listener.py). Of two ranks of a group the higher one dials (connector.py; the core
knows this rule too: Mesh::awaits_dial). A link to a group that this rank has not made yet waits until it does.

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
from bagua.net.connector import Deadline, dial_tcp, dial_unix
from bagua.net.fork_guard import close_in_child
from bagua.net.interfaces import InterfaceAddress
from bagua.net.listener import IncomingLink, Listener, close_all
from bagua.net.liveness import REFUSED_SECONDS, LivenessCheck, LivenessMonitor, exited_error
from bagua.net.peer_status import PeerStatus, RegisteredGroup
from bagua.net.rendezvous import RankRecord
from bagua.net.torch_transport import TorchTransport

__all__ = ["Endpoint"]

logger = logging.getLogger("bagua")

_POLL_SECONDS = 0.05
# A rank that has dialed for so long queries the peer's status too, so that it can answer ranks that wait for itself.
_MONITORED_AFTER_SECONDS = 0.5
_DOORBELL_BYTES = 64  # csrc/common/doorbell.h
# By backend: how collectives on tensors of a device move.
_DEVICE_TRANSPORTS = {"auto": "auto", "native": "staged", "nccl": "nccl", "torch": "staged"}


class Endpoint:
    """This process as other ranks reach it: its listening sockets, and its links to them.

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
        self.secret = b""
        self._groups: dict[str, RegisteredGroup] = {}
        self._incoming: dict[tuple[str, int], IncomingLink] = {}  # (group, dialer's global rank)
        self._changed = threading.Condition()  # guards the two above and announces attachments
        self._listener: Listener | None = None
        self._failure: InternalError | None = None  # of the listener's thread; guarded by the same lock
        self._process = _C.ProcessWaits()
        self._peer_status = PeerStatus([], b"", self._groups, self._process)
        self._monitor = LivenessMonitor()
        self._sockets: list[socket.socket] = []
        tcp = self._listen(address.family, _bindable(address))
        self.port: int = tcp.getsockname()[1]
        self.unix_name = f"bagua-{os.getpid()}-{secrets.token_hex(8)}" if settings.shared_memory else ""
        if self.unix_name:
            self._listen(socket.AF_UNIX, "\0" + self.unix_name)

    def _listen(self, family: int, address: object) -> socket.socket:
        sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
        self._sockets.append(sock)
        sock.bind(address)
        sock.listen(1024)
        return sock

    def start(self, records: list[RankRecord], secret: bytes) -> None:
        """Begin to accept; called once, when the table of ranks and the secret are known."""
        self.records, self.secret = records, secret
        self._peer_status = PeerStatus(records, secret, self._groups, self._process)
        self._listener = Listener(self._sockets, secret, self._accepted, self._listener_failed)

    def close(self) -> None:
        """Stop accepting and close everything that was not passed to a group."""
        self._monitor.close()
        if self._listener is not None:
            self._listener.close()
        for sock in self._sockets:
            sock.close()
        with self._changed:
            for link in self._incoming.values():
                link.close()
            self._incoming.clear()
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

        def connect(peer: int, left_s: float, timeout_s: float) -> None:
            self._connect(name, rank, ranks[peer], left_s, timeout_s)

        thresholds = self.settings.thresholds
        way = _DEVICE_TRANSPORTS[self.settings.backend]
        core = _C.Group(name, ranks.index(rank), ranks, spin_us, same_host, thresholds, connect, self._process, way)
        with self._changed:
            if self._failure is not None:
                core.poison(self._failure)
            self._groups[name] = RegisteredGroup(core, ranks)
            self._peer_status.group_opened(name)
            for group, peer in [key for key in self._incoming if key[0] == name]:
                self._attach_if_complete(group, peer)
        return core

    def close_core(self, name: str, core: _C.Group) -> None:
        """End the core's worker thread and announce the shutdown to the peers."""
        with self._changed:
            self._peer_status.group_closes(name)
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
        """Called before these cores are closed: if one has failed, tell ranks that are not connected why."""
        self._peer_status.report(names, rank)
        with self._changed:
            for group, peer in [key for key in self._incoming if self._peer_status.has_failed(key[0])]:
                self._incoming.pop((group, peer)).close()

    def share_memory(self, rank: int, peer: int) -> bool:
        """Whether two ranks (global) are on one host and both have shared memory switched on."""
        mine, theirs = self.records[rank], self.records[peer]
        return mine.host == theirs.host and bool(mine.unix_name) and bool(theirs.unix_name)

    def same_node(self, rank: int, peer: int) -> bool:
        """Whether two ranks (global) are on one host."""
        return self.records[rank].host == self.records[peer].host

    def _connect(self, name: str, rank: int, peer: int, left_s: float, timeout_s: float) -> None:
        """Make sure that the group has a channel to `peer`; `rank` and `peer` are global.

        Called by the thread that runs the group's operation: its worker, or the caller's. `timeout_s` is the timeout of
        the operation, of which `left_s` are left.

        Raises:
            DeadlineExceeded: the peer cannot be reached, or (where it has to dial) has not dialed.
            TransportError: its process has exited.
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

        begin = time.monotonic()
        if registered.ranks.index(rank) < group_peer:
            self._await_dial(name, registered, rank, peer, timeout_s, Deadline(begin + left_s, still_wanted))
            return
        is_monitored = False

        def still_dialing() -> None:
            nonlocal is_monitored
            still_wanted()
            if not is_monitored and time.monotonic() > begin + _MONITORED_AFTER_SECONDS:
                is_monitored = True
                self.monitor(name, rank, peer, timeout_s)

        self._dial_until(name, registered, rank, peer, timeout_s, Deadline(begin + left_s, still_dialing))

    def _await_dial(
        self, name: str, registered: RegisteredGroup, rank: int, peer: int, timeout_s: float, deadline: Deadline
    ) -> None:
        check = self._liveness_check(name, registered, rank, peer, timeout_s)
        while not self._wait_for_attachment(registered.core, check.group_peer):
            deadline.still_wanted()
            if time.monotonic() > deadline.at:
                self._raise_late(name, registered, rank, peer, timeout_s, deadline)
            check.check(deadline.still_wanted)

    def _liveness_check(
        self, name: str, registered: RegisteredGroup, rank: int, peer: int, timeout_s: float
    ) -> LivenessCheck:
        record, shares_memory = self.records[peer], self.share_memory(rank, peer)
        return LivenessCheck(self._peer_status, record, name, registered, rank, peer, shares_memory, timeout_s)

    def monitor(self, name: str, rank: int, peer: int, timeout_s: float) -> None:
        """A group waits for `peer` (`rank` and `peer` are global): fail the group if the peer will never connect."""
        registered = self._groups.get(name)
        if registered is not None:
            self._monitor.add(self._liveness_check(name, registered, rank, peer, timeout_s))

    def _raise_late(
        self, name: str, registered: RegisteredGroup, rank: int, peer: int, timeout_s: float, deadline: Deadline
    ) -> NoReturn:
        """The connection was not made in time: raise an error that names the rank at fault (Mesh::blame)."""
        core, group_peer = registered.core, registered.ranks.index(peer)
        seconds = core.answer_grace_seconds(timeout_s)

        def query() -> None:
            try:
                answers = self._peer_status.query(name, registered, rank, peer, deadline.still_wanted, seconds)
            except ConnectionRefusedError as error:
                raise exited_error(self.records[peer], group_peer) from error
            if not answers:
                self._check_host(registered, rank, peer, timeout_s)

        core.blame(group_peer, timeout_s, query)
        raise AssertionError("blame always raises")

    def _check_host(self, registered: RegisteredGroup, rank: int, peer: int, timeout_s: float) -> None:
        """Raise if the host of a silent rank cannot be reached: then nothing shows that the process is to blame."""
        record, core = self.records[peer], registered.core
        if self.share_memory(rank, peer):
            return
        try:
            address = (record.address, record.port)
            socket.create_connection(address, core.answer_grace_seconds(timeout_s)).close()
        except ConnectionRefusedError:  # the host itself refused, so it can be reached
            return
        except OSError as error:
            here, there = registered.ranks.index(rank), registered.ranks.index(peer)
            what = (
                f"the connection between rank {here} and rank {there} is silent: cannot connect to rank {there} at "
                f"{record.address}:{record.port}: {error} (the network is cut, the host is down, or a firewall is in "
                "the way; BAGUA_SOCKET_IFNAME chooses the interface)"
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
        self, name: str, registered: RegisteredGroup, rank: int, peer: int, timeout_s: float, deadline: Deadline
    ) -> None:
        record, group_peer = self.records[peer], registered.ranks.index(peer)
        dial = self._dial_unix if self.share_memory(rank, peer) else self._dial_tcp
        refused_since: float | None = None
        while True:
            try:
                dial(name, registered.core, rank, peer, group_peer, deadline)
                return
            except (OSError, TransportError) as error:
                deadline.still_wanted()
                if isinstance(error, TransportError):  # it listens, but does not accept this connection (any more)
                    with contextlib.suppress(ConnectionRefusedError):
                        self._peer_status.query(name, registered, rank, peer, deadline.still_wanted)
                now = time.monotonic()
                refused_since = (refused_since or now) if isinstance(error, ConnectionRefusedError) else None
                if refused_since is not None and now - refused_since > REFUSED_SECONDS:
                    raise exited_error(self.records[peer], group_peer) from error
                if now > deadline.at - _POLL_SECONDS:
                    if isinstance(error, TransportError):  # it is running: it may itself be kept waiting
                        self._raise_late(name, registered, rank, peer, timeout_s, deadline)
                    self._check_host(registered, rank, peer, timeout_s)
                    what = (
                        f"cannot connect to rank {group_peer} at {record.address}:{record.port}: {error}; check that "
                        "its process is running and that no firewall is in the way, or choose the interface with "
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

    def _dial_unix(self, name: str, core: _C.Group, rank: int, peer: int, group_peer: int, deadline: Deadline) -> None:
        ring_bytes = self.settings.shm_ring_bytes
        about = self._about(name, rank, peer, secrets.token_hex(8), 0)
        rings = os.memfd_create("bagua-rings", os.MFD_CLOEXEC)
        try:
            os.ftruncate(rings, _C.shm_segment_bytes(ring_bytes))
            sock, doorbell = dial_unix(self.records[peer], self.secret, about, [rings, core.doorbell_fd()], deadline)
        except BaseException:
            os.close(rings)
            raise
        core.attach_shm(group_peer, sock.detach(), rings, ring_bytes, True, doorbell)

    def _dial_tcp(self, name: str, core: _C.Group, rank: int, peer: int, group_peer: int, deadline: Deadline) -> None:
        link = secrets.token_hex(8)
        tag = self._torch.next_tag() if self._torch is not None else 0
        abouts = [self._about(name, rank, peer, link, index, tag) for index in range(1 + self.settings.tcp_streams)]
        sockets = dial_tcp(self.records[peer], self.secret, abouts, deadline)
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

    # ---- accepting: on the listener's thread, and in open_core for links that came before the group was made

    def _accepted(self, sock: socket.socket, about: dict, descriptors: list[int]) -> None:
        if self._peer_status.is_status_message(about):
            close_all([], descriptors)
            self._peer_status.handle(sock, about)
            return
        try:
            announced = IncomingLink.announced(about, bool(descriptors))
        except BaseException:
            close_all([sock], descriptors)
            raise
        group, peer, index = about["group"], about["from"], about["index"]
        if self._peer_status.has_failed(group):
            close_all([sock], descriptors)
            return
        with self._changed:
            link = self._incoming.get((group, peer))
            if link is None or link.id != announced.id or index in link.sockets:
                if link is not None:
                    link.close()  # the dialer has abandoned that attempt
                link = self._incoming[group, peer] = announced
            link.sockets[index] = sock
            if descriptors:
                close_all([], link.descriptors)
                link.descriptors = descriptors
            self._attach_if_complete(group, peer)

    def _listener_failed(self, error: Exception) -> None:
        with self._changed:
            self._failure = InternalError(f"a rank no longer accepts connections, because of {error!r}; see its log")
            for registered in self._groups.values():
                registered.core.poison(self._failure)

    def _attach_if_complete(self, group: str, peer: int) -> None:
        registered = self._groups.get(group)
        if registered is None or not self._incoming[group, peer].is_complete:
            return
        link = self._incoming.pop((group, peer))
        try:
            self._attach(group, registered, peer, link)
        except Exception as error:  # nothing that a peer sends may end this rank
            logger.warning("the connection of rank %d to group '%s' failed: %s", peer, group, error)
        finally:
            link.close()
        self._changed.notify_all()

    def _attach(self, name: str, registered: RegisteredGroup, peer: int, link: IncomingLink) -> None:
        """Answer the dialer and pass the connection to the core; what stays in `link` the caller closes."""
        core, group_peer = registered.core, registered.ranks.index(peer)
        if core.is_attached(group_peer):
            raise TransportError(f"rank {group_peer} is connected already")
        control = link.sockets[0]
        if link.descriptors:
            sizes = _C.shm_segment_bytes(link.ring_bytes), _DOORBELL_BYTES
            for fd, size in zip(link.descriptors, sizes, strict=True):
                if os.fstat(fd).st_size < size:  # reading behind the end of a segment would kill this process (SIGBUS)
                    raise TransportError(f"it passed {os.fstat(fd).st_size} bytes of shared memory, expected {size}")
            socket.send_fds(control, [b"D"], [core.doorbell_fd()])
            rings, doorbell = link.descriptors
            link.descriptors = []
            core.attach_shm(group_peer, control.detach(), rings, link.ring_bytes, False, doorbell)
        else:
            control.sendall(b"A")
            sockets = [link.sockets[index] for index in range(1 + link.streams)]
            self._attach_tcp(name, core, group_peer, peer, sockets, link.tag)


def _bindable(address: InterfaceAddress) -> tuple:
    host = address.address
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]

"""Outgoing connections: calls another rank's listener and authenticates itself (listener.py accepts them).

Every wait is cut into pieces of `_POLL_SECONDS`, between which the caller's `still_wanted` may raise: no thread goes on
dialing for a group that has failed or is being destroyed. When to dial, dialer.py decides.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua.errors import TransportError
from bagua.net.auth import Credentials, dial, set_no_delay
from bagua.net.fork_guard import close_in_child
from bagua.net.rendezvous import RankRecord

__all__ = ["Attempt", "HostProbe", "dial_link", "dial_tcp", "dial_unix", "notify"]

_POLL_SECONDS = 0.05
_ANSWERS = (0, errno.ECONNREFUSED)


@dataclass
class Attempt:
    """One call of a rank's listener: whether anybody still needs it, and how far it has come."""

    still_wanted: Callable[[], None]  # raises when no group does
    silence_s: float  # after so long without an acknowledgement from the peer's host, it is an OSError
    is_connected: bool = False  # the peer's host has taken the connection; its process has yet to answer


def dial_link(
    record: RankRecord, credentials: Credentials, about: dict, over_unix: bool, attempt: Attempt
) -> socket.socket | None:
    """The connection for the link to a rank's process; None where one that the rank has dialed stands before it."""
    if over_unix:
        sock = _authenticated(socket.AF_UNIX, "\0" + record.unix_name, credentials, about, attempt)
    else:
        sock = _authenticated_tcp(record, credentials, about, attempt)
    try:
        if _receive(sock, 1, attempt) == b"A":
            _unwatch_host(sock)
            return sock
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def dial_unix(
    record: RankRecord, credentials: Credentials, about: dict, descriptors: list[int], attempt: Attempt
) -> int:
    """Passes `descriptors` to a rank of this host for a group's channel; returns the descriptor of its doorbell."""
    with _authenticated(socket.AF_UNIX, "\0" + record.unix_name, credentials, about, attempt) as sock:
        socket.send_fds(sock, [b"F"], descriptors)
        _wait(sock, select.POLLIN, attempt)
        answer, received, flags, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if answer != b"D" or len(received) != 1:
            for fd in received:
                os.close(fd)
            raise TransportError("the connection ended before the peer sent its doorbell")
        return received[0]


def dial_tcp(record: RankRecord, credentials: Credentials, abouts: list[dict], attempt: Attempt) -> list[socket.socket]:
    """Connections to a rank for a group's channel, one for each of `abouts`, of which the first carries the answer."""
    sockets: list[socket.socket] = []
    try:
        for about in abouts:
            sockets.append(_authenticated_tcp(record, credentials, about, attempt))
        _wait(sockets[0], select.POLLIN, attempt)
        if sockets[0].recv(1) != b"A":
            raise TransportError("the connection ended before the peer accepted it")
        for sock in sockets:
            _unwatch_host(sock)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def notify(records: Sequence[RankRecord], credentials: Credentials, about: dict, seconds: float) -> int:
    """Send one message to several ranks at once; returns how many did not take it in time."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    pending: dict[int, tuple[socket.socket, _Notification]] = {}
    num_notified = 0
    try:
        for record in records:
            family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            sock = _new_socket(family)
            pending[sock.fileno()] = (sock, _Notification(sock, credentials, {**about, "to": record.rank}))
            sock.setblocking(False)
            sock.connect_ex(address)  # a failure shows in advance()
            poller.register(sock, select.POLLOUT)
        while pending and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * left):
                sock, notification = pending[fd]
                try:
                    if not notification.advance():
                        poller.modify(fd, select.POLLIN)
                        continue
                    num_notified += 1
                except (OSError, TransportError):
                    pass  # no process listens there
                poller.unregister(fd)
                del pending[fd]
                sock.close()
    finally:
        for sock, _ in pending.values():
            sock.close()
    return len(records) - num_notified


class HostProbe:
    """A second call of a host that has taken a connection on which nothing comes: whether the host is still there."""

    def __init__(self, record: RankRecord):
        family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
        self._sock = _new_socket(family)
        self._sock.setblocking(False)
        self._sock.connect_ex(address)

    def is_answered(self) -> bool:
        """Returns True if the host has taken or refused this connection."""
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        return bool(poller.poll(0)) and self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS

    def close(self) -> None:
        """Closes the connection; the host takes it for one of a stranger."""
        self._sock.close()


class _Notification:
    """One message under way: the state of its connection's handshake."""

    def __init__(self, sock: socket.socket, credentials: Credentials, about: dict):
        self._sock = sock
        self._handshake = dial(credentials, about, sock.sendall)
        self._needed: int | None = None  # None: not connected yet
        self._received = b""

    def advance(self) -> bool:
        """Continue, now that the socket is ready; whether the peer has taken the message."""
        if self._needed is None:
            self._needed = next(self._handshake)
            return False
        part = self._sock.recv(self._needed - len(self._received))
        if not part:
            raise TransportError("the peer closed the connection during the handshake")
        self._received += part
        if len(self._received) < self._needed:
            return False
        message, self._received = self._received, b""
        try:
            self._needed = self._handshake.send(message)
        except StopIteration:
            return True
        return False


def _authenticated_tcp(record: RankRecord, credentials: Credentials, about: dict, attempt: Attempt) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
    return _authenticated(family, address, credentials, about, attempt)


def _authenticated(
    family: int, address: object, credentials: Credentials, about: dict, attempt: Attempt
) -> socket.socket:
    """A connected, non-blocking socket after the handshake."""
    sock = _new_socket(family)
    try:
        if family != socket.AF_UNIX:
            _watch_host(sock, attempt.silence_s)
        sock.setblocking(False)
        _connect(sock, address, attempt)
        handshake = dial(credentials, about, sock.sendall)
        needed = next(handshake)
        while True:
            try:
                needed = handshake.send(_receive(sock, needed, attempt))
            except StopIteration:
                return sock
    except BaseException:
        sock.close()
        raise


def _new_socket(family: int) -> socket.socket:
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    if family != socket.AF_UNIX:
        set_no_delay(sock)
    return sock


def _watch_host(sock: socket.socket, silence_s: float) -> None:
    """Watches the link until the core has it: a host that dies meanwhile would never be heard of again."""
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):  # a peer that is stopped sends nothing, its host does
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))


def _unwatch_host(sock: socket.socket) -> None:
    """Leaves it to the link's heartbeats; a receiver may be slow for as long as it likes."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _connect(sock: socket.socket, address: object, attempt: Attempt) -> None:
    code = sock.connect_ex(address)
    while code == errno.EAGAIN:  # a Unix listener whose queue is full
        attempt.still_wanted()
        time.sleep(_POLL_SECONDS)
        code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        _wait(sock, select.POLLOUT, attempt)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code != 0:
        raise OSError(code, os.strerror(code))
    attempt.is_connected = True


def _wait(sock: socket.socket, event: int, attempt: Attempt) -> None:
    poller = select.poll()
    poller.register(sock, event)
    while not poller.poll(1000 * _POLL_SECONDS):
        attempt.still_wanted()


def _receive(sock: socket.socket, count: int, attempt: Attempt) -> bytes:
    message = bytearray()
    while len(message) < count:
        _wait(sock, select.POLLIN, attempt)
        part = sock.recv(count - len(message))
        if not part:
            raise TransportError("the peer closed the connection during the handshake")
        message += part
    return bytes(message)

"""Outgoing connections: dials another rank's listener and authenticates itself (listener.py accepts them).

Every wait is cut into pieces of `_POLL_SECONDS`, between which the caller's `still_wanted` may raise: a rank whose
group has failed or is being destroyed must not go on dialing until its deadline.
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
from bagua.net.auth import dial, set_no_delay
from bagua.net.fork_guard import close_in_child
from bagua.net.rendezvous import RankRecord

__all__ = ["Deadline", "dial_tcp", "dial_unix", "has_exited", "notify", "query"]

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Deadline:
    """Until when to wait, and whether anybody still needs the result."""

    at: float  # on the monotonic clock
    still_wanted: Callable[[], None]  # raises when nobody does

    def next_wait_s(self) -> float:
        """Seconds to wait before checking again. Raises TimeoutError, or what `still_wanted` raises."""
        self.still_wanted()
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, _POLL_SECONDS)

    def pause(self) -> None:
        time.sleep(self.next_wait_s())


def dial_unix(
    record: RankRecord, secret: bytes, about: dict, descriptors: list[int], deadline: Deadline
) -> tuple[socket.socket, int]:
    """A connection to a rank of this host, to which the `descriptors` are passed, and the doorbell that it returns."""
    sock = _authenticated(socket.AF_UNIX, "\0" + record.unix_name, secret, about, deadline)
    try:
        socket.send_fds(sock, [b"F"], descriptors)
        _wait_for_answer(sock, about["group"], deadline)
        answer, received, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if answer != b"D" or len(received) != 1:
            for fd in received:
                os.close(fd)
            raise TransportError("the connection ended before the peer sent its doorbell")
    except BaseException:
        sock.close()
        raise
    return sock, received[0]


def dial_tcp(record: RankRecord, secret: bytes, abouts: list[dict], deadline: Deadline) -> list[socket.socket]:
    """Connections to a rank, one for each of `abouts`, of which the first carries the answer."""
    sockets: list[socket.socket] = []
    try:
        for about in abouts:
            sockets.append(_authenticated_tcp(record, secret, about, deadline))
        _wait_for_answer(sockets[0], abouts[0]["group"], deadline)
        if sockets[0].recv(1) != b"A":
            raise TransportError("the connection ended before the peer accepted it")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def notify(records: Sequence[RankRecord], secret: bytes, about: dict, seconds: float) -> int:
    """Send one message to several ranks at once; returns how many did not take it in time."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    pending: dict[int, tuple[socket.socket, _Notification]] = {}
    num_notified = 0
    try:
        for record in records:
            family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            sock = _new_socket(family)
            pending[sock.fileno()] = (sock, _Notification(sock, secret, {**about, "to": record.rank}))
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
                    pass  # nobody listens there
                poller.unregister(fd)
                del pending[fd]
                sock.close()
    finally:
        for sock, _ in pending.values():
            sock.close()
    return len(records) - num_notified


class _Notification:
    """One message under way: the state of its connection's handshake."""

    def __init__(self, sock: socket.socket, secret: bytes, about: dict):
        self._sock = sock
        self._handshake = dial(secret, about, sock.sendall)
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


def query(record: RankRecord, secret: bytes, about: dict, deadline: Deadline) -> bytes:
    """A rank's answer to `about`, over a connection of its own: four bytes of length, and as many as they say."""
    with _authenticated_tcp(record, secret, about, deadline) as sock:
        return _receive(sock, int.from_bytes(_receive(sock, 4, deadline), "little"), deadline)


def has_exited(record: RankRecord) -> bool:
    """Whether a rank of this host has exited: it opens its Unix listener before it publishes its record."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex("\0" + record.unix_name) == errno.ECONNREFUSED


def _authenticated_tcp(record: RankRecord, secret: bytes, about: dict, deadline: Deadline) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
    return _authenticated(family, address, secret, about, deadline)


def _authenticated(family: int, address: object, secret: bytes, about: dict, deadline: Deadline) -> socket.socket:
    """A connected, non-blocking socket after the handshake."""
    sock = _new_socket(family)
    try:
        sock.setblocking(False)
        _connect(sock, address, deadline)
        handshake = dial(secret, about, sock.sendall)
        needed = next(handshake)
        while True:
            try:
                needed = handshake.send(_receive(sock, needed, deadline))
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


def _connect(sock: socket.socket, address: object, deadline: Deadline) -> None:
    code = sock.connect_ex(address)
    while code == errno.EAGAIN:  # a Unix listener whose queue is full
        deadline.pause()
        code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        _wait(sock, select.POLLOUT, deadline)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code != 0:
        raise OSError(code, os.strerror(code))


def _wait(sock: socket.socket, event: int, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(sock, event)
    while not poller.poll(1000 * deadline.next_wait_s()):
        pass


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    message = bytearray()
    while len(message) < count:
        _wait(sock, select.POLLIN, deadline)
        part = sock.recv(count - len(message))
        if not part:
            raise TransportError("the peer closed the connection during the handshake")
        message += part
    return bytes(message)


def _wait_for_answer(sock: socket.socket, group: str, deadline: Deadline) -> None:
    try:
        _wait(sock, select.POLLIN, deadline)
    except TimeoutError:
        raise TransportError(
            f"it is running but does not have the group '{group}', or accepts no connection for it"
        ) from None

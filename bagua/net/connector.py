"""The way out: opens a connection to another rank's listener and proves who we are (listener.py is the way in).

Nothing here waits in one piece: every `_SLICE_SECONDS` the caller's `still_wanted` may raise, so that a rank whose
group has failed or is being destroyed does not stand at a closed door until its deadline.
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
from bagua.net.auth import be_prompt, dial
from bagua.net.fork_guard import close_in_child
from bagua.net.rendezvous import RankRecord

__all__ = ["Patience", "ask", "dial_tcp", "dial_unix", "is_gone", "tell"]

_SLICE_SECONDS = 0.05


@dataclass(frozen=True)
class Patience:
    """How long to wait, and whether it is still worth it."""

    deadline: float  # on the monotonic clock
    still_wanted: Callable[[], None]

    def slice(self) -> float:
        """Seconds to wait before looking again. Raises TimeoutError, or what `still_wanted` raises."""
        self.still_wanted()
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, _SLICE_SECONDS)

    def pause(self) -> None:
        time.sleep(self.slice())


def dial_unix(
    record: RankRecord, secret: bytes, about: dict, descriptors: list[int], patience: Patience
) -> tuple[socket.socket, int]:
    """A connection to a rank of this host, which gets the `descriptors`; and the descriptor that it gave for them."""
    sock = _proven(socket.AF_UNIX, "\0" + record.unix_name, secret, about, patience)
    try:
        socket.send_fds(sock, [b"F"], descriptors)
        _wait_for_answer(sock, about["group"], patience)
        answer, received, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if answer != b"D" or len(received) != 1:
            for fd in received:
                os.close(fd)
            raise TransportError("the connection ended before the peer sent its doorbell")
    except BaseException:
        sock.close()
        raise
    return sock, received[0]


def dial_tcp(record: RankRecord, secret: bytes, abouts: list[dict], patience: Patience) -> list[socket.socket]:
    """Connections to a rank, one for each of `abouts`, of which the first carries the answer."""
    sockets: list[socket.socket] = []
    try:
        for about in abouts:
            sockets.append(_proven_tcp(record, secret, about, patience))
        _wait_for_answer(sockets[0], abouts[0]["group"], patience)
        if sockets[0].recv(1) != b"A":
            raise TransportError("the connection ended before the peer accepted it")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def tell(records: Sequence[RankRecord], secret: bytes, about: dict, seconds: float) -> int:
    """Leave a message with several ranks at once; returns how many have not taken it in time."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    under_way: dict[int, tuple[socket.socket, _Telling]] = {}
    num_told = 0
    try:
        for record in records:
            family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            sock = _prompt_socket(family)
            under_way[sock.fileno()] = (sock, _Telling(sock, secret, about))
            sock.setblocking(False)
            sock.connect_ex(address)  # how it ends shows when it is used
            poller.register(sock, select.POLLOUT)
        while under_way and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * left):
                sock, telling = under_way[fd]
                try:
                    if not telling.advance():
                        poller.modify(fd, select.POLLIN)
                        continue
                    num_told += 1
                except (OSError, TransportError):
                    pass  # nobody there
                poller.unregister(fd)
                del under_way[fd]
                sock.close()
    finally:
        for sock, _ in under_way.values():
            sock.close()
    return len(records) - num_told


class _Telling:
    """The handshake of one connection, as far as it has come."""

    def __init__(self, sock: socket.socket, secret: bytes, about: dict):
        self._sock = sock
        self._handshake = dial(secret, about, sock.sendall)
        self._needed: int | None = None  # None: not connected yet
        self._received = b""

    def advance(self) -> bool:
        """Go on, now that the socket is ready; whether the message has been taken."""
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


def ask(record: RankRecord, secret: bytes, about: dict, patience: Patience) -> bytes:
    """What a rank answers to a question, over a connection of its own: four bytes of length, and that many."""
    with _proven_tcp(record, secret, about, patience) as sock:
        return _receive(sock, int.from_bytes(_receive(sock, 4, patience), "little"), patience)


def is_gone(record: RankRecord) -> bool:
    """Whether a rank of this host has ended: its Unix listener is there from before its record until its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex("\0" + record.unix_name) == errno.ECONNREFUSED


def _proven_tcp(record: RankRecord, secret: bytes, about: dict, patience: Patience) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
    return _proven(family, address, secret, about, patience)


def _proven(family: int, address: object, secret: bytes, about: dict, patience: Patience) -> socket.socket:
    """A connected, non-blocking socket after the handshake."""
    sock = _prompt_socket(family)
    try:
        sock.setblocking(False)
        _connect(sock, address, patience)
        handshake = dial(secret, about, sock.sendall)
        needed = next(handshake)
        while True:
            try:
                needed = handshake.send(_receive(sock, needed, patience))
            except StopIteration:
                return sock
    except BaseException:
        sock.close()
        raise


def _prompt_socket(family: int) -> socket.socket:
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    if family != socket.AF_UNIX:
        be_prompt(sock)
    return sock


def _connect(sock: socket.socket, address: object, patience: Patience) -> None:
    code = sock.connect_ex(address)
    while code == errno.EAGAIN:  # a Unix listener whose queue is full
        patience.pause()
        code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        _wait(sock, select.POLLOUT, patience)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code != 0:
        raise OSError(code, os.strerror(code))


def _wait(sock: socket.socket, event: int, patience: Patience) -> None:
    poller = select.poll()
    poller.register(sock, event)
    while not poller.poll(1000 * patience.slice()):
        pass


def _receive(sock: socket.socket, count: int, patience: Patience) -> bytes:
    message = bytearray()
    while len(message) < count:
        _wait(sock, select.POLLIN, patience)
        part = sock.recv(count - len(message))
        if not part:
            raise TransportError("the peer closed the connection during the handshake")
        message += part
    return bytes(message)


def _wait_for_answer(sock: socket.socket, group: str, patience: Patience) -> None:
    try:
        _wait(sock, select.POLLIN, patience)
    except TimeoutError:
        raise TransportError(
            f"it is there but does not have the group '{group}', or takes no connection for it"
        ) from None

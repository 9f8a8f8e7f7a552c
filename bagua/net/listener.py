"""The way in: one thread, "bagua-accept", serves the listeners of a rank without ever blocking (connector.py dials).

A connection is a stranger until the handshake has proved that it knows the job's secret; a stranger costs nothing but
a log line, and those become rarer as strangers become more.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bagua.errors import TransportError
from bagua.net.auth import accept, be_prompt
from bagua.net.fork_guard import close_in_child

__all__ = ["Acceptor", "Arrival", "close_all"]

logger = logging.getLogger("bagua")

# A connection that has not proved itself by then is dropped; so is the oldest when there are too many.
_HANDSHAKE_SECONDS = 10.0
_MAX_STRANGERS = 128
_NO_DESCRIPTORS_PAUSE_SECONDS = 0.1


@dataclass
class Arrival:
    """What an authenticated peer has brought so far for one group."""

    link: str
    streams: int
    ring_bytes: int
    tag: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)  # TCP: 0 is control, then the data streams
    descriptors: list[int] = field(default_factory=list)  # Unix: rings, doorbell

    @classmethod
    def announced(cls, about: dict, num_ranks: int, is_unix: bool) -> Arrival:
        """By what the dialer says of itself, which knows the secret, but may be of another version, or broken.

        Raises:
            TransportError: a field is missing, of another type or out of its range.
        """
        for name in ("group", "link"):
            if type(about.get(name)) is not str:
                raise TransportError(f"its {name} is {about.get(name)!r}, expected a text")
        limits = {"from": (0, num_ranks - 1), "streams": (0, 64), "ring_bytes": (1 << 12, 1 << 30), "tag": (0, 1 << 20)}
        limits["index"] = (0, 0 if is_unix else about.get("streams"))  # last: of streams that are a number by then
        for name, (low, high) in limits.items():
            value = about.get(name)
            if type(value) is not int or not low <= value <= high:
                raise TransportError(f"its {name} is {value!r}, expected {low}..{high}")
        if about["ring_bytes"] & (about["ring_bytes"] - 1):
            raise TransportError(f"its ring_bytes is {about['ring_bytes']}, expected a power of two")
        return cls(about["link"], about["streams"], about["ring_bytes"], about["tag"])

    @property
    def is_complete(self) -> bool:
        return len(self.sockets) == (1 if self.descriptors else 1 + self.streams)

    def close(self) -> None:
        close_all(self.sockets.values(), self.descriptors)


def close_all(sockets: Iterable[socket.socket], descriptors: Iterable[int]) -> None:
    """What an authenticated peer has brought, when nobody wants it."""
    for sock in sockets:
        sock.close()
    for fd in descriptors:
        os.close(fd)


@dataclass
class _Stranger:
    """A connection in the middle of its handshake."""

    sock: socket.socket
    generator: object
    since: float
    is_unix: bool
    needed: int = 0
    received: bytearray = field(default_factory=bytearray)
    is_silent: bool = True  # has sent nothing yet
    about: dict | None = None  # set once authenticated; a Unix dialer then still owes its descriptors


class Acceptor:
    """Hands every connection that has proved itself to `arrived`.

    Args:
        listeners: TCP and Unix sockets, owned by the caller, who closes them after close().
        secret: what a connection must know.
        arrived: called on the thread with the socket, what the dialer says of itself, and (Unix) its two descriptors;
            owns the socket and the descriptors, also when it raises.
        failed: called on the thread when it ends by a mistake of its own, so that nobody waits in vain.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        secret: bytes,
        arrived: Callable[[socket.socket, dict, list[int]], None],
        failed: Callable[[Exception], None],
    ):
        self._listeners = listeners
        self._secret = secret
        self._arrived, self._failed = arrived, failed
        self._num_refused = 0
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[socket.socket, _Stranger] = {}  # the thread's own, oldest first
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="bagua-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; closes the connections that have not arrived."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for sock in self._strangers:
            sock.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- everything below runs on the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the thread that takes connections ended")
            self._failed(error)

    def _serve(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select(timeout=1.0 if self._strangers else None):
                if key.fileobj == self._wake_read:
                    return
                if key.data is None:
                    self._take_connections(key.fileobj)
                elif key.data.sock in self._strangers:  # an earlier event may have pushed it out
                    self._advance(key.data)
            now = time.monotonic()
            for stranger in [s for s in self._strangers.values() if now - s.since > _HANDSHAKE_SECONDS]:
                self._refuse(stranger, "it said nothing for too long")

    def _take_connections(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # The connection stays in the queue and would wake us at once.
                    logger.warning("no file descriptor left for a new connection; raise `ulimit -n`")
                    time.sleep(_NO_DESCRIPTORS_PAUSE_SECONDS)
                return  # otherwise: nobody left in the queue, or the connection was given up in the meantime
            close_in_child(sock).setblocking(False)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._refuse(next(iter(self._strangers.values())), "too many connections at once")
            is_unix = sock.family == socket.AF_UNIX
            if not is_unix:
                be_prompt(sock)
            stranger = _Stranger(sock, accept(self._secret, sock.sendall), time.monotonic(), is_unix)
            stranger.needed = next(stranger.generator)
            self._strangers[sock] = stranger
            self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        port = stranger.sock.getsockname()[1] if not stranger.is_unix else "(Unix)"
        self._forget(stranger)
        stranger.sock.close()
        self._num_refused += 1
        # The first, then ever more rarely: a flood must not fill the disk.
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning("refused connection %d to port %s: %s", self._num_refused, port, why)

    def _advance(self, stranger: _Stranger) -> None:
        try:
            while stranger.about is None:
                self._read_handshake(stranger)
            descriptors = _receive_descriptors(stranger.sock, 2) if stranger.is_unix else []
        except BlockingIOError:
            return
        except Exception as error:  # whatever a stranger does, the thread goes on
            if stranger.is_unix and stranger.is_silent:  # a rank that looks whether this one is there (dialing.is_gone)
                self._forget(stranger)
                stranger.sock.close()
            else:
                self._refuse(stranger, str(error) or type(error).__name__)
            return
        self._forget(stranger)
        try:
            self._arrived(stranger.sock, stranger.about, descriptors)
        except Exception as error:
            logger.warning("a connection of rank %s failed: %s", stranger.about.get("from"), error)

    def _read_handshake(self, stranger: _Stranger) -> None:
        part = stranger.sock.recv(stranger.needed - len(stranger.received))
        if not part:
            raise TransportError("it closed before it had proved itself")
        stranger.is_silent = False
        stranger.received += part
        if len(stranger.received) < stranger.needed:
            return
        message, stranger.received = bytes(stranger.received), bytearray()
        try:
            stranger.needed = stranger.generator.send(message)
        except StopIteration as finished:
            stranger.about = finished.value


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    item = array.array("i").itemsize
    message, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(count * item), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % item])
            descriptors += numbers
    if message != b"F" or len(descriptors) != count:
        for fd in descriptors:
            os.close(fd)
        raise TransportError("it did not pass its descriptors")
    return descriptors

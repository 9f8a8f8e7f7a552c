"""Incoming connections: one thread, "bagua-accept", serves a rank's listening sockets without ever blocking.

A peer is unauthenticated until the handshake (auth.py) has proved that it knows the job's key. Until then it costs
a log line at most, and the log lines become rarer as refused connections become more.
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
from bagua.net.auth import Credentials, accept, set_no_delay
from bagua.net.exhausted import exhausted_error, start_thread
from bagua.net.fork_guard import close_in_child

__all__ = ["IncomingChannel", "Listener", "close_all"]

logger = logging.getLogger("bagua")

# A peer that has not authenticated itself by then is dropped; so is the oldest when there are too many.
_HANDSHAKE_SECONDS = 10.0
_MAX_UNAUTHENTICATED = 128
_RANKS_HANDSHAKE_SECONDS = 1.0  # a rank that runs takes less; others go first where descriptors end
_NO_DESCRIPTORS_PAUSE_SECONDS = 0.1
_TIDY_SECONDS = 1.0


@dataclass
class IncomingChannel:
    """The connections of an authenticated peer's channel to one group, as far as they have been accepted."""

    id: str
    streams: int
    ring_bytes: int
    tag: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    descriptors: list[int] = field(default_factory=list)  # Unix: rings, doorbell
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def announced(cls, about: dict, is_unix: bool) -> IncomingChannel:
        """Reads the dialer's description of itself: it knows the secret, but may be of another version, or broken.

        Raises:
            TransportError: a field is missing, of another type or out of its range.
        """
        for name in ("group", "channel"):
            if type(about.get(name)) is not str:
                raise TransportError(f"its {name} is {about.get(name)!r}, expected a text")
        limits = {"streams": (0, 64), "ring_bytes": (1 << 12, 1 << 30), "tag": (0, 1 << 20)}
        for name, (low, high) in limits.items():
            _check_number(about, name, low, high)
        _check_number(about, "index", 0, 0 if is_unix else max(about["streams"], 1) - 1)
        if about["ring_bytes"] & (about["ring_bytes"] - 1):
            raise TransportError(f"its ring_bytes is {about['ring_bytes']}, expected a power of two")
        return cls(about["channel"], about["streams"], about["ring_bytes"], about["tag"])

    @property
    def is_complete(self) -> bool:
        return len(self.sockets) == (1 if self.descriptors else max(self.streams, 1))

    def close(self) -> None:
        close_all(self.sockets.values(), self.descriptors)


def _check_number(about: dict, name: str, low: int, high: int) -> None:
    value = about.get(name)
    if type(value) is not int or not low <= value <= high:
        raise TransportError(f"its {name} is {value!r}, expected {low}..{high}")


def close_all(sockets: Iterable[socket.socket], descriptors: Iterable[int]) -> None:
    """Closes sockets and descriptors of an authenticated peer that will not be used."""
    for sock in sockets:
        sock.close()
    for fd in descriptors:
        os.close(fd)


@dataclass
class _UnauthenticatedPeer:
    """A connection in the middle of its handshake."""

    sock: socket.socket
    generator: object
    since: float
    is_unix: bool
    needed: int = 0
    received: bytearray = field(default_factory=bytearray)
    about: dict | None = None  # set once authenticated; a Unix dialer may then have yet to pass descriptors


class Listener:
    """Passes every authenticated connection to `accepted`.

    Args:
        sockets: listening TCP and Unix sockets, owned by the caller, who closes them after close().
        credentials: this rank's; a peer must know the key and mean this rank.
        accepted: called on the thread with the socket, what the dialer says about itself, and (Unix) its two
            descriptors; it owns the socket and the descriptors, also when it raises.
        failed: called on the thread when an error of its own ends it, so that no group waits for connections in vain.
        exhausted: called on the thread while no file descriptor is left for a connection; it may come
            again.
        works: called on the thread: whether this rank is at work, and not about to begin or to end. Only then is a
            connection that the other side ends in the middle of its handshake worth a warning: ranks that are
            interrupted, or that have no time left to tell of a failure, let go of theirs.
        tidy: called on the thread, about once a second while it says that there is more to look after: lets go of what
            `accepted` keeps and no group has claimed.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        credentials: Credentials,
        accepted: Callable[[socket.socket, dict, list[int]], None],
        failed: Callable[[Exception], None],
        exhausted: Callable[[Exception], None],
        works: Callable[[], bool] = lambda: True,
        tidy: Callable[[], bool] = lambda: False,
    ):
        self._sockets = sockets
        self._credentials = credentials
        self._accepted, self._failed, self._exhausted, self._works = accepted, failed, exhausted, works
        self._tidy = tidy
        self._num_refused = 0
        self._selector = selectors.DefaultSelector()
        self._unauthenticated: dict[socket.socket, _UnauthenticatedPeer] = {}  # used by the thread only; oldest first
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="bagua-accept", daemon=True)
        try:
            start_thread(self._thread, credentials.rank)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop accepting, and close the connections that are not authenticated yet."""
        self._is_closing = True
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():  # otherwise its start was interrupted, and it ends before it serves anybody
            self._thread.join()
        for sock in self._unauthenticated:
            sock.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- everything below runs on the thread

    def _run(self) -> None:
        if self._is_closing:
            return
        try:
            self._serve()
        except Exception as error:
            try:
                logger.exception("the thread that accepts connections has failed")
            finally:  # without memory not even that can be said
                self._failed(error)

    def _serve(self) -> None:
        for sock in self._sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        is_untidy, tidied_at = False, -_TIDY_SECONDS
        while True:
            for key, _ in self._selector.select(timeout=_TIDY_SECONDS if self._unauthenticated or is_untidy else None):
                if key.fileobj == self._wake_read:
                    return
                if key.data is None:
                    self._accept_connections(key.fileobj)
                elif key.data.sock in self._unauthenticated:  # an earlier event may have dropped it
                    self._advance(key.data)
            self._refuse_older_than(
                _HANDSHAKE_SECONDS, f"it did not authenticate itself within {_HANDSHAKE_SECONDS:g} s"
            )
            is_untidy = True  # until it has been looked at, which is not for every connection
            if time.monotonic() >= tidied_at + _TIDY_SECONDS:
                is_untidy, tidied_at = self._tidy(), time.monotonic()

    def _refuse_older_than(self, seconds: float, why: str) -> bool:
        """Returns True if there was any such unauthenticated peer."""
        before = time.monotonic() - seconds
        old = [peer for peer in self._unauthenticated.values() if peer.since < before]
        for peer in old:
            self._refuse(peer, why)
        return bool(old)

    def _accept_connections(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._refuse_older_than(_RANKS_HANDSHAKE_SECONDS, "no file descriptor left"):
                        continue
                    logger.warning("no file descriptor left for a new connection; raise `ulimit -n`")
                    if not self._unauthenticated:  # which must not fail anybody by holding them
                        self._exhausted(error)
                    # The connection stays in the queue, so select() would return at once.
                    time.sleep(_NO_DESCRIPTORS_PAUSE_SECONDS)
                return  # the queue is empty, or the peer has closed the connection in the meantime
            close_in_child(sock).setblocking(False)
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                self._refuse(next(iter(self._unauthenticated.values())), "too many unauthenticated connections")
            is_unix = sock.family == socket.AF_UNIX
            if not is_unix:
                set_no_delay(sock)
            peer = _UnauthenticatedPeer(sock, accept(self._credentials, sock.sendall), time.monotonic(), is_unix)
            peer.needed = next(peer.generator)
            self._unauthenticated[sock] = peer
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _forget(self, peer: _UnauthenticatedPeer) -> None:
        self._selector.unregister(peer.sock)
        del self._unauthenticated[peer.sock]

    def _refuse(self, peer: _UnauthenticatedPeer, why: str) -> None:
        port = peer.sock.getsockname()[1] if not peer.is_unix else "(Unix)"
        self._forget(peer)
        peer.sock.close()
        self._num_refused += 1
        # The first, then ever more rarely: a flood must not fill the disk.
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning("refused connection %d to port %s: %s", self._num_refused, port, why)

    def _advance(self, peer: _UnauthenticatedPeer) -> None:
        try:
            while peer.about is None:
                self._read_handshake(peer)
            passes = peer.is_unix and peer.about.get("purpose") == "channel"
            descriptors = _receive_descriptors(peer.sock, 2) if passes else []
        except BlockingIOError:
            return
        except Exception as error:  # no peer may end the thread
            if isinstance(error, ConnectionError) and not self._works():
                logger.debug("the other side ended a connection: %s", error)
                self._forget(peer)
                peer.sock.close()
                return
            if exhausted_error(error, None) is not None:
                self._exhausted(error)
            self._refuse(peer, str(error) or type(error).__name__)
            return
        self._forget(peer)
        try:
            self._accepted(peer.sock, peer.about, descriptors)
        except Exception as error:
            if exhausted_error(error, None) is not None:
                self._exhausted(error)
            logger.warning("a connection of rank %s failed: %s", peer.about.get("from"), error)

    def _read_handshake(self, peer: _UnauthenticatedPeer) -> None:
        part = peer.sock.recv(peer.needed - len(peer.received))
        if not part:
            raise ConnectionResetError("it closed the connection before it had authenticated itself")
        peer.received += part
        if len(peer.received) < peer.needed:
            return
        message, peer.received = bytes(peer.received), bytearray()
        try:
            peer.needed = peer.generator.send(message)
        except StopIteration as finished:
            peer.about = finished.value


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    item = array.array("i").itemsize
    message, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_SPACE(count * item), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % item])
            descriptors += numbers
    if message != b"F" or len(descriptors) != count:
        close_all([], descriptors)
        if flags & socket.MSG_CTRUNC and len(descriptors) < count:  # not those that it passed beyond `count`
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not message:
            raise ConnectionResetError("it closed the connection before it had passed its descriptors")
        raise TransportError("it did not pass its descriptors")
    return descriptors

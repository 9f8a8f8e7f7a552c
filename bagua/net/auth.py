"""Mutual authentication of a new connection, in both roles, as generators that never block.

    dialer    -> HELLO: magic, 32 random bytes, length, JSON (who I am, what this connection is for)
    acceptor  -> 32 random bytes
    dialer    -> HMAC-SHA256(secret, "dialer" | hello | acceptor's random bytes)
    acceptor  -> HMAC-SHA256(secret, "acceptor" | hello | acceptor's random bytes)

The dialer proves itself first, so an unauthenticated peer learns nothing. A generator yields how many bytes it needs
next and is sent exactly those; it writes through `send`, whose messages are small enough for any socket buffer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Generator

from bagua.errors import TransportError

__all__ = ["MAGIC", "accept", "dial", "set_no_delay"]

MAGIC = b"BAGUA/1\n"
_RANDOM_BYTES = 32
_PREFIX = struct.Struct(f"<{len(MAGIC)}s{_RANDOM_BYTES}sH")
_MAX_HELLO_BYTES = 16 * 1024

Handshake = Generator[int, bytes, dict]


def set_no_delay(sock: socket.socket) -> None:
    """Switch Nagle's algorithm off on a TCP socket, before the handshake.

    It holds back the second of two small messages that go the same way, here the acceptor's proof and its answer after
    it, until the first is acknowledged, which a peer with nothing to send delays by up to 40 ms.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _proof(secret: bytes, role: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.new(secret, role + b"|" + hello + challenge, hashlib.sha256).digest()


def accept(secret: bytes, send: Callable[[bytes], None]) -> Handshake:
    """The listening side; returns what the dialer says about itself.

    Raises:
        TransportError: the peer does not speak the protocol, or does not know the secret.
        ValueError, RecursionError: an authenticated peer describes itself by something that is not JSON.
    """
    prefix = yield _PREFIX.size
    magic, _, length = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > _MAX_HELLO_BYTES:
        raise TransportError("the connection does not speak bagua's protocol")
    body = yield length
    hello = prefix + body
    challenge = secrets.token_bytes(_RANDOM_BYTES)
    send(challenge)
    proof = yield hashlib.sha256().digest_size
    if not hmac.compare_digest(proof, _proof(secret, b"dialer", hello, challenge)):
        raise TransportError("the connection does not know the job's token")
    send(_proof(secret, b"acceptor", hello, challenge))
    about = json.loads(body)
    if not isinstance(about, dict):
        raise TransportError(f"the connection describes itself by a {type(about).__name__}, expected names and values")
    return about


def dial(secret: bytes, about: dict, send: Callable[[bytes], None]) -> Handshake:
    """The connecting side; returns `about`. Raises TransportError when the other side does not know the token."""
    body = json.dumps(about).encode()
    hello = _PREFIX.pack(MAGIC, secrets.token_bytes(_RANDOM_BYTES), len(body)) + body
    send(hello)
    challenge = yield _RANDOM_BYTES
    send(_proof(secret, b"dialer", hello, challenge))
    proof = yield hashlib.sha256().digest_size
    if not hmac.compare_digest(proof, _proof(secret, b"acceptor", hello, challenge)):
        raise TransportError("the listener does not know the job's token: another program answers at that address")
    return about

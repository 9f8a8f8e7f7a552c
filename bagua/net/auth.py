"""The keys that are made of the job's token, and mutual authentication of a new connection.

A token is stretched once per rendezvous, with the digest of all ranks' records as its salt (rendezvous.py), into the
key of that rendezvous. So the key is bound to the job, to this start of it and to every address in the table: a proof
made with it says nothing anywhere else, and two ranks that have read different tables do not connect.

Both roles of a handshake are generators that never block:

    dialer    -> HELLO: magic, 32 random bytes, length, JSON (from which rank, to which, what this connection is for)
    acceptor  -> 32 random bytes
    dialer    -> HMAC-SHA256(key, "dialer" | hello | acceptor's random bytes)
    acceptor  -> HMAC-SHA256(key, "acceptor" | hello | acceptor's random bytes)

The dialer proves itself first, so an unauthenticated peer learns nothing; until then the JSON is not looked at. The
acceptor proves itself only to a dialer that means this rank, so what is relayed to another rank, or back to its sender,
fails. A generator yields how many bytes it needs next and is sent exactly those; it writes through `send`, whose
messages are small enough for any socket buffer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from bagua.errors import TransportError

__all__ = ["MAGIC", "Credentials", "accept", "derive", "dial", "set_no_delay", "stretch"]

MAGIC = b"BAGUA/2\n"
_RANDOM_BYTES = 32
_PREFIX = struct.Struct(f"<{len(MAGIC)}s{_RANDOM_BYTES}sH")
_MAX_HELLO_BYTES = 16 * 1024

# The cost of a guess: 16 MiB and some 50 ms of a core.
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}

Handshake = Generator[int, bytes, dict]


def stretch(token: str, salt: bytes) -> bytes:
    """The key, 32 bytes, that stands for a token where its proofs can be read: scrypt, with a public salt."""
    return hashlib.scrypt(token.encode(), salt=salt, **_SCRYPT)


def derive(key: bytes, purpose: bytes) -> bytes:
    """A key of its own for a purpose, or a proof for it; 32 bytes, from which the key cannot be found."""
    return hmac.new(key, purpose, hashlib.sha256).digest()


@dataclass(frozen=True)
class Credentials:
    """The secrets by which this rank proves itself to the others and checks them.

    Attributes:
        key: of this rendezvous; only ranks of the job have it.
        rank: this one.
        world_size: of the rendezvous.
    """

    key: bytes = field(repr=False)
    rank: int
    world_size: int


def set_no_delay(sock: socket.socket) -> None:
    """Switch Nagle's algorithm off on a TCP socket, before the handshake.

    It holds back the second of two small messages that go the same way, here the acceptor's proof and its answer after
    it, until the first is acknowledged, which a peer with nothing to send delays by up to 40 ms.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _proof(credentials: Credentials, role: bytes, hello: bytes, challenge: bytes) -> bytes:
    return derive(credentials.key, role + b"|" + hello + challenge)


def accept(credentials: Credentials, send: Callable[[bytes], None]) -> Handshake:
    """The listening side; returns what the dialer says about itself, whose "from" and "to" are checked.

    Raises:
        TransportError: the peer does not speak the protocol, does not know the key, or means another rank.
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
    if not hmac.compare_digest(proof, _proof(credentials, b"dialer", hello, challenge)):
        raise TransportError("the connection does not know the job's token")
    about = json.loads(body)
    if not isinstance(about, dict):
        raise TransportError(f"the connection describes itself by a {type(about).__name__}, expected names and values")
    dialer, meant = about.get("from"), about.get("to")
    if type(dialer) is not int or not 0 <= dialer < credentials.world_size:
        raise TransportError(f"its from is {dialer!r}, expected 0..{credentials.world_size - 1}")
    if type(meant) is not int or meant != credentials.rank or dialer == credentials.rank:
        raise TransportError(f"it goes from rank {dialer} to rank {meant!r}, but this is rank {credentials.rank}")
    send(_proof(credentials, b"acceptor", hello, challenge))
    return about


def dial(credentials: Credentials, about: dict, send: Callable[[bytes], None]) -> Handshake:
    """The connecting side; returns `about`, which says "from" and "to" which rank the connection goes.

    Raises:
        TransportError: the other side does not know the key.
    """
    body = json.dumps(about).encode()
    hello = _PREFIX.pack(MAGIC, secrets.token_bytes(_RANDOM_BYTES), len(body)) + body
    send(hello)
    challenge = yield _RANDOM_BYTES
    send(_proof(credentials, b"dialer", hello, challenge))
    proof = yield hashlib.sha256().digest_size
    if not hmac.compare_digest(proof, _proof(credentials, b"acceptor", hello, challenge)):
        raise TransportError("the listener does not know the job's token: another program answers at that address")
    return about

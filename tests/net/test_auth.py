"""The handshake by itself: both roles as generators, and everything that unauthenticated peers may try."""

import queue
import secrets
import socket
import struct

import pytest

from bagua.errors import TransportError
from bagua.net import connector
from bagua.net.auth import MAGIC, Credentials, accept, dial
from bagua.net.listener import Listener

KEY = b"the key of this rendezvous"
ABOUT = {"group": "world", "from": 1, "to": 0}


def rank(number, key=KEY):
    return Credentials(key, number, 4)


class Side:
    """One role with its incoming bytes."""

    def __init__(self, role, credentials, *arguments):
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.generator = role(credentials, *arguments, self.outgoing.extend)
        self.needed = next(self.generator)
        self.result = None

    def feed(self, data):
        """Takes bytes in; runs as far as they go."""
        self.incoming += data
        while self.result is None and len(self.incoming) >= self.needed:
            message, self.incoming = bytes(self.incoming[: self.needed]), self.incoming[self.needed :]
            try:
                self.needed = self.generator.send(message)
            except StopIteration as finished:
                self.result = finished.value

    def take(self):
        data = bytes(self.outgoing)
        self.outgoing.clear()
        return data


def run(dialer, acceptor, step=None):
    """Carries bytes to and fro until nothing moves; `step` bytes at a time."""
    while True:
        moved = False
        for source, target in ((dialer, acceptor), (acceptor, dialer)):
            data = source.take()
            for at in range(0, len(data), step or max(1, len(data))):
                target.feed(data[at : at + (step or len(data))])
                moved = True
        if not moved:
            return


def pair(dialer_key=KEY, acceptor_key=KEY, about=ABOUT):
    return Side(dial, rank(1, dialer_key), about), Side(accept, rank(0, acceptor_key))


@pytest.mark.parametrize("step", [None, 1], ids=["whole", "byte by byte"])
def test_both_sides_prove_themselves(step):
    dialer, acceptor = pair()
    run(dialer, acceptor, step)
    assert acceptor.result == ABOUT and dialer.result == ABOUT
    assert not acceptor.incoming and not dialer.incoming, "not a byte more than was needed"


def test_a_dialer_without_the_secret_learns_nothing():
    dialer, acceptor = pair(dialer_key=b"a guess")
    acceptor.feed(dialer.take())
    challenge = acceptor.take()
    dialer.feed(challenge)
    with pytest.raises(TransportError, match="does not know the job's token"):
        acceptor.feed(dialer.take())
    assert len(challenge) == 32 and not acceptor.take(), "random bytes, and no proof after a wrong one"


def test_a_listener_without_the_secret_is_refused():
    dialer, acceptor = pair()
    impostor = Side(accept, rank(0, b"a guess"))
    impostor.feed(dialer.take())
    dialer.feed(impostor.take())
    with pytest.raises(TransportError, match="another program answers at that address"):
        dialer.feed(secrets.token_bytes(32))
    assert acceptor.result is None


def test_a_listener_that_sends_the_dialers_own_proof_back_is_refused():
    dialer, _ = pair()
    dialer.take()
    dialer.feed(bytes(32))
    with pytest.raises(TransportError, match="does not know"):
        dialer.feed(dialer.take())


def test_a_recorded_handshake_cannot_be_played_again():
    dialer, acceptor = pair()
    hello = dialer.take()
    acceptor.feed(hello)
    dialer.feed(acceptor.take())
    proof = dialer.take()
    acceptor.feed(proof)
    assert acceptor.result == ABOUT
    again = Side(accept, rank(0))
    again.feed(hello)
    with pytest.raises(TransportError, match="does not know"):
        again.feed(proof)


def test_what_a_dialer_says_of_itself_is_covered_by_its_proof():
    dialer, acceptor = pair()
    acceptor.feed(dialer.take().replace(b'"from": 1', b'"from": 2'))
    dialer.feed(acceptor.take())
    with pytest.raises(TransportError, match="does not know"):
        acceptor.feed(dialer.take())


def test_what_is_relayed_to_another_rank_is_refused_before_that_proves_itself():
    """An attacker who answers in the place of rank 0 asks rank 2 for the proof that rank 1 expects."""
    dialer, other = Side(dial, rank(1), ABOUT), Side(accept, rank(2))
    other.feed(dialer.take())
    dialer.feed(other.take())
    with pytest.raises(TransportError, match="it goes from rank 1 to rank 0, but this is rank 2"):
        other.feed(dialer.take())
    assert not other.take() and other.result is None and dialer.result is None


def test_what_is_reflected_to_its_sender_is_refused():
    """The dialer's own listener makes no proof of it, neither under its own name nor to itself."""
    for about in (ABOUT, ABOUT | {"to": 1}):
        dialer, own_listener = Side(dial, rank(1), about), Side(accept, rank(1))
        own_listener.feed(dialer.take())
        dialer.feed(own_listener.take())
        with pytest.raises(TransportError, match="but this is rank 1"):
            own_listener.feed(dialer.take())
        assert not own_listener.take()


@pytest.mark.parametrize(
    "ends", [{}, {"from": 1}, {"from": 4, "to": 0}, {"from": -1, "to": 0}, {"from": True, "to": 0}]
)
def test_ends_that_are_no_ranks(ends):
    dialer, acceptor = Side(dial, rank(1), ends), Side(accept, rank(0))
    with pytest.raises(TransportError, match="its from is|but this is rank 0"):
        run(dialer, acceptor)
    assert dialer.result is None and acceptor.result is None


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
        bytes(64),
        b"\xff" * 64,
        MAGIC + bytes(32) + struct.pack("<H", 65535),
        b"BAGUA/1\n" + bytes(32) + struct.pack("<H", 2) + b"{}",
    ],
    ids=["http", "zeros", "ones", "too long", "another version"],
)
def test_garbage_is_no_handshake(hello):
    acceptor = Side(accept, rank(0))
    with pytest.raises(TransportError, match="does not speak bagua's protocol"):
        acceptor.feed(hello)
    assert not acceptor.take()


def test_random_bytes_never_get_in():
    for seed in range(200):
        acceptor = Side(accept, rank(0))
        data = secrets.token_bytes(200) if seed % 2 else MAGIC + secrets.token_bytes(32) + b"\x10\x00" + bytes(100)
        with pytest.raises(TransportError):
            acceptor.feed(data)
        assert acceptor.result is None


def test_a_truncated_handshake_waits_for_more():
    dialer, acceptor = pair()
    hello = dialer.take()
    acceptor.feed(hello[:-1])
    assert acceptor.result is None and not acceptor.take(), "nothing is said before the hello is complete"
    acceptor.feed(hello[-1:])
    assert acceptor.take()


def test_tcp_holds_no_small_message_back():
    """On either side, whatever is said after the proof: 40 ms each time, until the other side acknowledges it."""
    arrived = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Listener([listener], rank(0), lambda sock, about, _: arrived.put(sock), pytest.fail, pytest.fail)
        attempt = connector.Attempt(lambda: None, 10.0)
        try:
            with connector._authenticated(socket.AF_INET, listener.getsockname(), rank(1), ABOUT, attempt) as dialed:
                with arrived.get(timeout=20) as accepted:
                    for sock in (dialed, accepted):
                        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            acceptor.close()

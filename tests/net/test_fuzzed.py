"""The parsers of what strangers send: the handshake, the records in the store, and messages of authenticated ranks.

Whatever comes, they return what is well formed, or raise what they say. Five minutes of it are the slow test.
"""

import json
import struct
import time

import pytest

from bagua.distributed import plain_data
from bagua.errors import TransportError
from bagua.net import auth, rendezvous
from bagua.net.auth import Credentials
from bagua.net.listener import IncomingChannel

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis, which cannot be imported")
st = hypothesis.strategies

EXAMPLES = 15
SLOW_S = 300.0
KEY = b"the key of this rendezvous"
DIALER, ACCEPTOR = Credentials(KEY, 1, 4), Credentials(KEY, 0, 4)
LINK = {"group": "g", "from": 1, "to": 0, "channel": "c", "index": 0, "streams": 2, "ring_bytes": 1 << 20, "tag": 0}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def near(valid):
    """Descriptions with some of their values replaced, or without them."""
    return st.builds(
        lambda changes, without: {key: value for key, value in (valid | changes).items() if key not in without},
        st.dictionaries(st.sampled_from(list(valid)), values, max_size=3),
        st.sets(st.sampled_from(list(valid)), max_size=2),
    )


def mutated(texts):
    """Bytes of which some are changed, cut off or repeated."""

    def change(text, edits):
        text = bytearray(text)
        for at, what in edits:
            at = at % (len(text) + 1)
            text[at : at + len(what) // 2] = what
        return bytes(text)

    return st.builds(change, texts, st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6)), max_size=4))


def drive(generator, data):
    """Feeds a handshake; what it returns, or None where it wants more."""
    needed = next(generator)
    while len(data) >= needed:
        assert 0 <= needed <= 1 << 14
        part, data = data[:needed], data[needed:]
        try:
            needed = generator.send(part)
        except StopIteration as done:
            return done.value
    return None


def without_the_key(data):
    sent = []
    for handshake in (auth.accept(ACCEPTOR, sent.append), auth.dial(DIALER, LINK, sent.append)):
        try:
            assert drive(handshake, data) is None, "somebody without the key is in"
        except TransportError:
            pass
    # Random bytes; the dialer's hello and proof, which nobody else can use.
    assert len(sent) <= 3


prefixes = st.builds(
    lambda magic, random, length: magic + random + struct.pack("<H", length),
    st.sampled_from([auth.MAGIC, auth.MAGIC[:7] + b"\0"]),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 65535),
)
strangers = st.binary(max_size=200) | st.builds(lambda *parts: b"".join(parts), prefixes, st.binary(max_size=400))


def with_the_key(body):
    """A broken rank of the job: all is right but what it says of itself."""
    hello = auth._PREFIX.pack(auth.MAGIC, bytes(32), len(body)) + body
    sent = []
    acceptor = auth.accept(ACCEPTOR, sent.append)
    acceptor.send(hello[: next(acceptor)])
    acceptor.send(body)
    try:
        acceptor.send(auth._proof(DIALER, b"dialer", hello, sent[0]))
    except StopIteration as done:
        about = done.value
        assert about["to"] == 0 and about["from"] in (1, 2, 3) and len(sent) == 2
        for is_unix in (True, False):
            try:
                link = IncomingChannel.announced(about, is_unix)
                assert 0 <= about["index"] <= link.streams <= 64 and link.ring_bytes.bit_count() == 1
            except TransportError:
                pass
    except (TransportError, ValueError, RecursionError):
        assert len(sent) == 1, "what is refused gets no proof"


bodies = (near(LINK) | values).map(lambda value: json.dumps(value).encode())
bodies = mutated(bodies).filter(lambda body: len(body) <= auth._MAX_HELLO_BYTES)

RECORD = rendezvous.RankRecord(
    *(1, 4, "1.0", rendezvous.PROTOCOL, "native", "the defaults", "host", 0, "fe80::1%eth0", 4000, "unix-1", 7),
    *(10_000, "a token", "0" * 32),
)


def record(text):
    try:
        parsed = rendezvous.RankRecord.parse(text, 1)
    except TransportError as error:
        assert len(str(error)) < 1000
        return
    assert parsed.rank == 1
    if parsed.protocol == rendezvous.PROTOCOL:
        assert 0 < parsed.port < 65536 and [*map(type, vars(parsed).values())] == [*map(type, vars(RECORD).values())]
        assert rendezvous.RankRecord.parse(parsed.to_json(), 1) == parsed


texts = near(json.loads(RECORD.to_json())).map(lambda value: json.dumps(value).encode())
records = texts | mutated(texts) | st.binary(max_size=300) | values.map(lambda value: json.dumps(value).encode())


def fault(text):
    assert rendezvous._readable(text).isprintable() and len(rendezvous._readable(text)) <= 2000


def message(text):
    try:
        value = plain_data.loads(text)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError):
        return
    repr(value)


entries = st.recursive(
    scalars | st.binary(max_size=9) | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
)
messages = mutated(entries.map(plain_data.dumps)) | values.map(lambda value: json.dumps(value).encode())

PARSERS = {
    "handshake of a stranger": (without_the_key, strangers),
    "handshake of a rank": (with_the_key, bodies),
    "record": (record, records),
    "fault": (fault, st.binary(max_size=9000)),
    "message": (message, messages),
}


def fuzz(check, inputs, examples, seed):
    unhurried = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much]
    hurried = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=unhurried, print_blob=True
    )
    hypothesis.seed(seed)(hurried(hypothesis.given(inputs)(check)))()


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_is_sent(name):
    fuzz(*PARSERS[name], EXAMPLES, seed=0)


@pytest.mark.slow("test_whatever_is_sent")
@pytest.mark.timed
@pytest.mark.timeout(3 * SLOW_S)
def test_whatever_is_sent_for_five_minutes():
    end, seed = time.monotonic() + SLOW_S, 0
    while time.monotonic() < end:
        for name, (check, inputs) in PARSERS.items():
            seed += 1
            print(f"{name}, seed {seed}")
            fuzz(check, inputs, 2000, seed)

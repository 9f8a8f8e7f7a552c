"""Somebody who reads and writes the store and connects to every port, but does not know the token.

It learns nothing that helps, and no rank is brought to its address: at worst the job ends, with an error in time. First
with a store that changes what each rank reads, at every point of the rendezvous; then as a process beside a job.
"""

import contextlib
import hashlib
import json
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.errors import BaguaError, TransportError
from bagua.net import auth, rendezvous
from bagua.net.auth import Credentials, derive
from bagua.net.listener import Listener
from bagua.testing import free_port
from tests.meeting import wait_until

pytestmark = pytest.mark.timed

TOKEN, ANOTHER = "5kZ0pW-qk2VQyXn3sE7cUw", "9aLr_T4hBf6mJd1vGi8oNx"
TIMEOUT_S = 60.0
QUICKLY_S = TIMEOUT_S / 4


class HostileStore:
    """One rank's view of a store that somebody else controls.

    Args:
        values: of all ranks; changed under `changed`.
        read: what this rank is given instead of a value, by key.
    """

    def __init__(self, values, changed, read):
        self._values, self._changed, self._read = values, changed, read

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def add(self, key, amount):
        with self._changed:
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
            return int(self._values[key])

    def check(self, keys):
        with self._changed:
            return all(key in self._values for key in keys)

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, QUICKLY_S)
            return self._read(key, self._values[key])

    def multi_get(self, keys):
        return [self.get(key) for key in keys]


def record(rank, world_size=2):
    fields = ("1.0", rendezvous.PROTOCOL, "native", "the defaults", f"host {rank}", rank)
    return rendezvous.RankRecord(rank, world_size, *fields, f"10.0.0.{rank}", 4000 + rank, f"unix-{rank}", 7)


def meet(reads=None, tokens=(TOKEN, TOKEN), values=None):
    """By rank: its records and credentials, or its error; `reads` are the views by rank. And what the store had."""
    values, changed = {} if values is None else values, threading.Condition()

    def one(rank):
        read = (reads or {}).get(rank, lambda key, value: value)
        store = HostileStore(values, changed, read)
        try:
            return rendezvous.exchange_records(
                store, record(rank, len(tokens)), tokens[rank], timedelta(seconds=TIMEOUT_S)
            )
        except BaguaError as error:
            return error

    begin = time.monotonic()
    with ThreadPoolExecutor(len(tokens)) as pool:
        results = list(pool.map(one, range(len(tokens))))
    assert time.monotonic() - begin < QUICKLY_S
    return results, values


@pytest.fixture
def fast(monkeypatch):
    """Without the cost of a guess."""
    monkeypatch.setattr(rendezvous, "stretch", lambda token, salt: hashlib.sha256(token.encode() + salt).digest())


def test_whoever_is_not_there_changes_nothing():
    results, values = meet()
    for rank, (records, credentials) in enumerate(results):
        assert [replace(it, nonce="", auth="") for it in records] == [record(0), record(1)]
        assert {it.auth for it in records} == {"a token"} and len({it.nonce for it in records}) == 2
        assert credentials == Credentials(results[0][1].key, rank, 2)
    assert sorted(values) == [f"{kind}/{rank}" for kind in ("claim", "done", "proof", "rank") for rank in (0, 1)]
    key = results[0][1].key
    for value in values.values():
        assert TOKEN.encode() not in value and key.hex().encode() not in value and key not in value
        assert key.hex() not in repr(results[0][1])
    (_, again), _ = meet()
    assert again[1].key != key, "every rendezvous has a key of its own"


CHANGES = {
    "another address": lambda value: value.replace(b'"10.0.0.', b'"10.6.6.'),
    "another port": lambda value: value.replace(b'"port": 400', b'"port": 600'),
    "another rank": lambda value: value.replace(b'"rank": ', b'"rank": 1'),
    "another protocol": lambda value: value.replace(b'"protocol": ', b'"protocol": 1'),
    "without a token": lambda value: value.replace(b"a token", b"no token"),
    "white space": lambda value: value + b" ",
    "nothing": lambda value: b"",
    "half": lambda value: value[: len(value) // 2],
    "zeros": lambda value: bytes(len(value)),
    "no text": lambda value: b"\xff\xfe" + value,
    "deep": lambda value: b"[" * 8000,
    "long": lambda value: value + b" " * 100_000,
    "a list": lambda value: b"[%s]" % value,
    "a number": lambda value: b"9" * 5000,
}


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("key", ["rank/0", "rank/1", "proof/0", "proof/1"])
def test_a_rank_that_is_shown_something_else(fast, key, victims):
    for name, change in CHANGES.items():
        seen = []

        def read(asked, value, change=change, seen=seen):
            if asked != key:
                return value
            seen.append(change(value) != value)
            return change(value)

        results, _ = meet(dict.fromkeys(victims, read))
        for rank, result in enumerate(results):
            if isinstance(result, BaguaError):
                assert any(seen), name
                continue
            # It may have completed before the others noticed; what it has is right.
            assert rank not in victims or not any(seen), name
            assert [it.address for it in result[0]] == ["10.0.0.0", "10.0.0.1"], name


def test_what_is_left_of_an_earlier_rendezvous(fast):
    _, earlier = meet()
    for key in ("rank/0", "proof/0"):
        results, _ = meet({1: lambda asked, value, key=key: earlier[asked] if asked == key else value})
        assert isinstance(results[1], BaguaError)
    # All of it, to a rank that is alone.
    values = {key: value for key, value in earlier.items() if key not in ("rank/1", "claim/1")}
    results, _ = meet(values=dict(values))
    assert all(isinstance(result, BaguaError) for result in results)
    alone = HostileStore(dict(values), threading.Condition(), lambda key, value: value)
    with pytest.raises(TransportError, match="has read other records in the store than rank 1"):
        rendezvous.exchange_records(alone, record(1), TOKEN, timedelta(seconds=TIMEOUT_S))


def test_a_rank_with_another_token(fast):
    results, _ = meet(tokens=(TOKEN, ANOTHER))
    assert all("rank 1's token is not rank 0's" in str(error) for error in results)
    results, _ = meet(tokens=(TOKEN, None))
    assert all("rank 0 has 'a token', rank 1 has 'no token'" in str(error) for error in results)


def test_a_fault_of_anybody_is_told_as_text(fast):
    results, _ = meet(values={"fault": b"\x1b[2J" + 5000 * b"\xff" + b"\n"})
    for error in results:
        told = str(error)
        assert "another rank gave up during the rendezvous" in told and told.isprintable() and len(told) < 3000
        assert error.rank is None
    for fault, rank in ((b"0 it is late", 0), (b"2 there is no such rank", None), (b"- nobody", None)):
        results, _ = meet(values={"fault": fault})
        for error in results:
            assert error.rank == rank and str(error).endswith(f": {fault[2:].decode()}"), error


def test_more_ranks_than_are_read_at_once(fast):
    results, _ = meet(tokens=70 * [TOKEN])
    assert all([it.rank for it in records] == [*range(70)] for records, _ in results)
    assert len({credentials.key for _, credentials in results}) == 1


# ---- beside a job


def job(rank, world_size, folder):
    """Works until the file `stop` is there. None, or the class, text and seconds of its error."""
    begin = time.monotonic()
    bagua.distributed.world._num_inits = 0  # a part of the keys, and an earlier test may have left this process more
    try:
        bagua.init_process_group(timeout=TIMEOUT_S)
        x = torch.ones(1000)
        bagua.all_reduce(x)
        with open(f"{folder}/{rank}", "w"):
            pass
        while True:
            stop = torch.tensor([int(os.path.exists(f"{folder}/stop"))])
            bagua.broadcast(stop, 0)
            if stop.item():
                return None
    except BaguaError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        with open(f"{folder}/{rank}", "w"):
            pass
        bagua.destroy_process_group()


class Attacker:
    """Has the store, as every process that reaches MASTER_PORT has it, and a port at which it waits for ranks."""

    def __init__(self, store):
        self.store = dist.PrefixStore("bagua/bagua/init1", store)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.1)

    def is_called(self):
        """Whether anybody has connected."""
        with contextlib.suppress(TimeoutError):
            self.listener.accept()[0].close()
            return True
        return False

    def lure(self, rank, known):
        """A record that names the attacker's port as the rank's."""
        port = self.listener.getsockname()[1]
        changes = {"rank": rank, "address": "127.0.0.1", "port": port, "unix_name": f"bagua-attacker-{port}"}
        return json.dumps(known | changes)


@pytest.fixture
def attacked(pool2, tmp_path):
    """Starts the job on two ranks, whose store this process serves, and returns it with the attacker."""
    with contextlib.ExitStack() as stack:

        def start(prepare=lambda attacker: None, **env):
            port = free_port()
            store = dist.TCPStore("127.0.0.1", port, None, True, timeout=timedelta(seconds=TIMEOUT_S))
            attacker = Attacker(store)
            stack.enter_context(attacker.listener)
            prepare(attacker)
            run = pool2.start(job, args=(str(tmp_path),), env={"MASTER_PORT": str(port), **env})
            stack.callback((tmp_path / "stop").touch)
            return attacker, run

        yield start


def both_are_there(folder):
    return all((folder / str(rank)).exists() for rank in range(2))


@pytest.mark.parametrize("shared_memory", [pytest.param("0", id="tcp"), pytest.param("1", id="shm")])
def test_an_attacker_joins_first(attacked, tmp_path, shared_memory):
    def join(attacker):
        attacker.store.add("claim/1", 1)
        known = json.loads(replace(record(1), auth="a token", nonce="0" * 32).to_json())
        attacker.store.set("rank/1", attacker.lure(1, known | {"host": rendezvous.host_identity(0)}))
        attacker.store.set("proof/1", "0" * 64 + " " + "0" * 64)

    attacker, run = attacked(join, BAGUA_AUTH_TOKEN=TOKEN, BAGUA_SHARED_MEMORY=shared_memory)
    wait_until(lambda: both_are_there(tmp_path), "the ranks have met in another round, or failed")
    (tmp_path / "stop").touch()
    for result in run.result():  # the same on both ranks
        assert result is None or result[2] < QUICKLY_S, result
        assert result is None or "another program, or somebody who can reach the store, has written to it" in result[1]
    assert not attacker.is_called()


def test_an_attacker_rewrites_addresses(attacked, tmp_path):
    """As fast as it can, and whatever comes first: the job works, or fails in time."""
    attacker, run = attacked(BAGUA_AUTH_TOKEN=TOKEN, BAGUA_SHARED_MEMORY="0")
    store, rewritten = attacker.store, set()
    while not both_are_there(tmp_path):
        for rank in {0, 1} - rewritten:
            if store.check([f"rank/{rank}"]):
                known = json.loads(store.get(f"rank/{rank}"))
                store.set(f"rank/{rank}", attacker.lure(rank, known))
                rewritten.add(rank)
    (tmp_path / "stop").touch()
    for result in run.result():
        assert result is None or result[2] < QUICKLY_S, result
    assert rewritten == {0, 1} and not attacker.is_called()


def enters(address, credentials, peer):
    """Whether a rank answers a status query over a connection that claims to come from the other one."""
    about = {"group": "nobody's", "from": 1 - peer, "to": peer, "status": ""}
    with socket.create_connection(address, QUICKLY_S) as sock:
        handshake = auth.dial(credentials, about, sock.sendall)
        needed = next(handshake)
        while True:
            part = sock.recv(needed, socket.MSG_WAITALL)
            if len(part) < needed:
                return False
            try:
                needed = handshake.send(part)
            except StopIteration:
                return True


@contextlib.contextmanager
def listening(ranks, taken):
    """The addresses at which these ranks listen; `taken` gets who was called."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for rank in ranks:
            sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def take(sock, about, descriptors, rank=rank):
                sock.close()
                taken.append((rank, about["from"], about["to"]))

            acceptor = Listener([sock], Credentials(b"key", rank, len(ranks)), take, pytest.fail, pytest.fail)
            stack.callback(acceptor.close)
            addresses.append(sock.getsockname())
        yield addresses


@pytest.mark.parametrize("works", [True, False])
def test_a_connection_that_its_dialer_ends_is_told_by_ranks_that_are_at_work(works, caplog):
    """In others it belongs to a rank that is about to begin or to end, too."""
    asked = threading.Event()

    def say():
        asked.set()
        return works

    with socket.create_server(("127.0.0.1", 0)) as sock:
        acceptor = Listener([sock], Credentials(b"key", 0, 2), pytest.fail, pytest.fail, pytest.fail, say)
        with caplog.at_level(logging.INFO, "bagua"), contextlib.closing(acceptor):
            socket.create_connection(sock.getsockname()).close()
            assert asked.wait(QUICKLY_S)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == works and all("it closed the connection before it had authenticated" in line for line in told)


def relay(listener, address):
    """Passes everything on between whoever calls and an address, until one of them ends it."""
    with listener.accept()[0] as caller, socket.create_connection(address) as called:
        ends = {caller: called, called: caller}
        while True:
            for end in select.select([*ends], [], [], QUICKLY_S)[0]:
                part = end.recv(4096)
                if not part:
                    return
                ends[end].sendall(part)


def test_what_a_relay_reaches():
    """The network brings rank 1, which means rank 0, to the attacker, who passes all on to one of the ranks."""
    taken, reached = [], []
    with listening(range(3), taken) as addresses, socket.create_server(("127.0.0.1", 0)) as attacker:
        for address in addresses:
            thread = threading.Thread(target=relay, args=(attacker, address))
            thread.start()
            reached.append(enters(attacker.getsockname(), Credentials(b"key", 1, 3), 0))
            thread.join()
    assert reached == [True, False, False], "to rank 0 itself it is a router"
    assert taken == [(0, 1, 0)]


def guesses(values, rows):
    """Keys that one may hope to find: what the store has, as it is and derived further in the ways that ranks do."""
    name = rendezvous.rendezvous_name(rows)
    found = {b"", name, *values}
    found |= {bytes.fromhex(word) for value in values for word in value.decode().split() if len(word) in (32, 64)}
    for key in list(found):
        found |= {derive(key, name), derive(key, b"connections"), derive(derive(key, name), b"connections")}
    return found


@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "no token"])
def test_an_attacker_reads_all_that_is_in_the_store(attacked, tmp_path, token):
    """Without a token, the store holds the key: that shows that these attempts are made the right way."""
    attacker, run = attacked(**({"BAGUA_AUTH_TOKEN": token} if token else {}))
    wait_until(lambda: both_are_there(tmp_path), "the job works")
    store = attacker.store
    keys = [f"{kind}/{rank}" for kind in ("claim", "rank", "proof") for rank in range(2)] + ["secret", "fault"]
    values = [store.get(key) for key in keys if store.check([key])]
    assert store.num_keys() <= len(values) + 2, "some that this test does not know: torch's own are one or two"
    rows = [store.get(f"rank/{rank}") for rank in range(2)]
    entered = 0
    for peer, row in enumerate(rows):
        known = json.loads(row)
        for key in guesses(values, rows):
            entered += enters((known["address"], known["port"]), Credentials(key, 1 - peer, 2), peer)
    assert entered == (0 if token else 2)
    (tmp_path / "stop").touch()
    assert run.result() == [None, None]


def test_a_guess_costs_what_it_should():
    """That of whoever has read the proofs: some milliseconds of a core and 16 MiB for each."""
    begin = time.process_time()
    auth.stretch(ANOTHER, bytes(32))
    assert time.process_time() - begin > 0.01
    assert auth._SCRYPT["n"] * auth._SCRYPT["r"] * 128 == 16 << 20

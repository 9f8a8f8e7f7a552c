"""Unauthenticated peers at the listening port while a job runs: the job goes on, and they leave nothing behind."""

import collections
import contextlib
import logging
import os
import random
import signal
import socket
import statistics
import struct
import threading
import time
from dataclasses import replace

import pytest
import torch

import bagua
from bagua.net import auth, listener
from bagua.testing import Pool
from bagua.testing.ranks import Run
from tests.distributed.worlds import SAME_TEST

pytestmark = pytest.mark.timed

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def job(rank, world_size, directory, num_steps):
    """Collectives until the file `stop` is there; publishes the listener's port, returns times and what is held."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    bagua.init_process_group(timeout=TIMEOUT_S)
    try:
        endpoint = bagua.distributed.world._world.endpoint
        step(rank, world_size)
        before = held()
        if rank == 0:
            publish(directory, "handshake", recorded(endpoint))
        bagua.barrier()
        publish(directory, f"rank{rank}", f"{endpoint.port} {endpoint.unix_name}".encode())
        seconds = {}  # by when it began
        while True:
            begin = time.monotonic()
            step(rank, world_size)
            seconds[begin] = time.monotonic() - begin
            # All ranks leave at the same step: rank 0 decides.
            stop = torch.tensor([int(os.path.exists(f"{directory}/stop"))])
            bagua.broadcast(stop, 0)
            if stop.item() and len(seconds) >= num_steps:
                break
        deadline = time.monotonic() + TIMEOUT_S / 4
        while held() > before and time.monotonic() < deadline:
            time.sleep(0.1)
        return seconds, before, held(), len(endpoint._incoming), lines
    finally:
        bagua.destroy_process_group()
        logging.getLogger("bagua").removeHandler(handler)


def step(rank, world_size):
    x = torch.full((20_000,), float(rank))
    bagua.all_reduce(x)
    assert (x == world_size * (world_size - 1) / 2).all()
    y = torch.arange(1000.0) * world_size + rank
    bagua.all_reduce(y, codec="minmax_uint8")


def held():
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))


def publish(directory, name, content):
    with open(f"{directory}/{name}.part", "wb") as file:
        file.write(content)
    os.rename(f"{directory}/{name}.part", f"{directory}/{name}")


def listening(run: Run, directory, rank):
    """(port, name of the Unix socket) of a rank of the job."""
    deadline = time.monotonic() + TIMEOUT_S
    while not os.path.exists(f"{directory}/rank{rank}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with open(f"{directory}/rank{rank}") as file:
        port, _, unix_name = file.read().partition(" ")
    return int(port), unix_name


def recorded(endpoint):
    """What an eavesdropper has seen a dialer send: its hello, and its proof for the acceptor's random bytes."""
    credentials, sent, answered = endpoint.credentials, [], []
    about = {"group": "world", "from": 1, "to": 0, "status": ""}
    dialer = auth.dial(replace(credentials, rank=1), about, sent.append)
    acceptor = auth.accept(replace(credentials, rank=0), answered.append)
    next(dialer)
    needed = next(acceptor)
    acceptor.send(sent[0][:needed])
    acceptor.send(sent[0][needed:])
    dialer.send(answered[0])
    return b"".join(sent)


class Hostile:
    """Connections to listening sockets, each with something else; what they get back is at most random bytes."""

    KINDS = ("random", "truncated", "replayed", "long", "wrong", "slow", "silent", "half-closed", "reset", "eager")
    HELD = 60  # of each target, that stay open

    def __init__(self, targets, handshake, seed):
        self._targets, self._handshake, self._source = targets, handshake, random.Random(seed)
        self._held = collections.deque()
        self.num_connected, self.most_received = collections.Counter(), 0

    def attack(self, connections, seconds=0.0):
        begin = time.monotonic()
        for number in range(connections):
            time.sleep(max(0.0, begin + seconds * number / connections - time.monotonic()))
            # In turn, so that all kinds come to all targets.
            kind = self.KINDS[number % len(self.KINDS)]
            target = self._targets[number // len(self.KINDS) % len(self._targets)]
            with contextlib.suppress(OSError):  # the listener hung up first, as it may
                self._connect(kind, *target)

    def _connect(self, kind, family, address):
        source, handshake = self._source, self._handshake
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(2.0)
        self._held.append(sock)
        sock.connect(address)
        self.num_connected[kind] += 1
        prefix = auth.MAGIC + source.randbytes(32)
        if kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(
            {
                "random": source.randbytes(source.randint(1, 4096)),
                "truncated": handshake[: source.randrange(len(handshake))],
                "replayed": handshake,
                "long": prefix + struct.pack("<H", 65535) + bytes(20_000),
                "wrong": handshake[:-1] + bytes([handshake[-1] ^ 1]),
                "slow": handshake[:1],
                "silent": b"",
                "half-closed": handshake[:-32],
                "reset": handshake[:50],
                # Whatever it may say is behind a proof that does not come.
                "eager": prefix + struct.pack("<H", 16384) + b"[" * 16384 + bytes(32) + b"F" * 100,
            }[kind]
        )
        if kind == "half-closed":
            sock.shutdown(socket.SHUT_WR)
        if kind in ("reset", "random"):
            self._end(self._held.pop())
        while len(self._held) > self.HELD:
            self._end(self._held.popleft())

    def _end(self, sock):
        sock.setblocking(False)
        with sock, contextlib.suppress(OSError):
            self.most_received = max(self.most_received, len(sock.recv(1000)))

    def close(self):
        while self._held:
            self._end(self._held.popleft())


def targets_of(run, directory):
    found = []
    for rank in range(2):
        port, unix_name = listening(run, directory, rank)
        found.append((socket.AF_INET, ("127.0.0.1", port)))
        if unix_name:
            found.append((socket.AF_UNIX, "\0" + unix_name))
    return found


def check_nothing_is_left(results):
    for before, after, num_incoming, lines in results:
        assert after[0] <= before[0] and after[1:] == before[1:], "descriptors, threads"
        assert num_incoming == 0 and 1 <= len(lines) <= 16, lines


def test_hostile_connections_of_every_kind(pool, tmp_path):
    """To all sockets that listen: the TCP and the Unix ones."""
    run = pool.start(job, args=(str(tmp_path), 1))
    targets = targets_of(run, tmp_path)
    hostile = Hostile(targets, (tmp_path / "handshake").read_bytes(), seed=1)
    hostile.attack(320)
    hostile.close()
    (tmp_path / "stop").touch()
    results = run.result()
    assert len(targets) == 4 and set(hostile.num_connected) == set(Hostile.KINDS)
    assert hostile.num_connected.total() > 300 and hostile.most_received <= 32
    check_nothing_is_left([result[1:] for result in results])
    assert max(max(times.values()) for times, *_ in results) < TIMEOUT_S / 4, "a step waited for unauthenticated peers"


@pytest.mark.slow("test_hostile_connections_of_every_kind")
@pytest.mark.parametrize("env", [pytest.param({}, id="shm"), pytest.param({"BAGUA_SHARED_MEMORY": "0"}, id="tcp")])
def test_a_step_takes_as_long_under_ten_thousand_connections(pool, tmp_path, env):
    """Compared with as many to a listener of this process, which take as much of the processor here.

    By turns, since other processes of the machine are not the same in every quarter of a minute.
    """
    run = pool.start(job, args=(str(tmp_path), 1), env=env)
    targets = targets_of(run, tmp_path)
    handshake = (tmp_path / "handshake").read_bytes()
    turns = [], []
    with contextlib.ExitStack() as stack:
        stack.callback((tmp_path / "stop").touch)
        decoy = stack.enter_context(Decoy())
        hostiles = [Hostile(attacked, handshake, seed) for seed, attacked in enumerate([[decoy.target], targets])]
        for _ in range(20):
            for hostile, phase in zip(hostiles, turns, strict=True):
                begin = time.monotonic()
                hostile.attack(500, seconds=0.75)
                phase.append((begin, time.monotonic()))
                hostile.close()
        for hostile in hostiles:
            assert hostile.num_connected.total() > 9_900 and hostile.most_received <= 32
    results = run.result()
    check_nothing_is_left([result[1:] for result in results])
    times = results[0][0]
    quiet, attacked = (
        statistics.median(taken for at, taken in times.items() if any(begin < at < end for begin, end in phase))
        for phase in turns
    )
    print(f"step under attack {1e6 * attacked:.0f} us, of another process {1e6 * quiet:.0f} us")
    assert attacked < 1.5 * quiet + 50e-6


class Decoy:
    """Accepts and closes connections, in a process of its own."""

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.target = (socket.AF_INET, self._listener.getsockname())
        self._child = os.fork()
        if self._child == 0:
            while True:
                self._listener.accept()[0].close()
        return self

    def __exit__(self, *_):
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._listener.close()


@contextlib.contextmanager
def listening_until_stopped(rank, directory):
    """A rank that publishes its listener and waits for the file `stop`; it has no connections yet."""
    bagua.init_process_group(timeout=TIMEOUT_S)
    try:
        endpoint = bagua.distributed.world._world.endpoint
        publish(directory, f"rank{rank}", f"{endpoint.port} {endpoint.unix_name}".encode())
        while not os.path.exists(f"{directory}/stop"):
            time.sleep(0.01)
        yield
    finally:
        bagua.destroy_process_group()


def connect_late(rank, world_size, directory):
    """Connects to the other rank only after the unauthenticated peers have."""
    with listening_until_stopped(rank, directory):
        begin = time.monotonic()
        step(rank, world_size)
        return time.monotonic() - begin


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="shm"), pytest.param({"BAGUA_SHARED_MEMORY": "0"}, id="tcp", marks=SAME_TEST)]
)
def test_silent_unauthenticated_peers_keep_no_rank_out(pool, tmp_path, env):
    """More of them than the listener keeps, half of them with half a hello, one of them byte by byte."""
    run = pool.start(connect_late, args=(str(tmp_path),), env=env)
    with contextlib.ExitStack() as sockets:
        for rank in range(2):
            port, unix_name = listening(run, tmp_path, rank)
            for i in range(200):
                sock = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
                if i % 2:
                    sock.sendall(b"BAGUA/1\n" + bytes(i % 30))
            for i in range(100 if unix_name else 0):
                sock = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.connect("\0" + unix_name)
                with contextlib.suppress(OSError):
                    sock.sendall(bytes(i % 3))
        (tmp_path / "stop").touch()
        assert max(run.result()) < listener._HANDSHAKE_SECONDS, "no rank had to wait until the others were dropped"


def test_a_slow_drip_is_cut_off(pool, tmp_path):
    """A byte now and then does not keep a connection open for longer than a handshake may take."""
    run = pool.start(with_short_handshake, args=(str(tmp_path),))
    port, _ = listening(run, tmp_path, 0)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(0.1)
        begin = time.monotonic()
        while time.monotonic() - begin < TIMEOUT_S:
            try:
                sock.sendall(b"B")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert 0.5 * SHORT_S < time.monotonic() - begin < 5 * SHORT_S
    (tmp_path / "stop").touch()
    run.result()


SHORT_S = 0.5


def with_short_handshake(rank, world_size, directory):
    seconds, listener._HANDSHAKE_SECONDS = listener._HANDSHAKE_SECONDS, SHORT_S
    try:
        with listening_until_stopped(rank, directory):
            pass
    finally:
        listener._HANDSHAKE_SECONDS = seconds

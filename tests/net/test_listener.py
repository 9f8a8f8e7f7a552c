"""Unauthenticated peers at the listening port while a job runs: the job goes on, and they leave nothing behind."""

import contextlib
import logging
import os
import socket
import time

import pytest
import torch

import bagua
from bagua.net import listener
from bagua.testing import Pool, send_garbage
from bagua.testing.ranks import Run
from tests.distributed.worlds import SAME_TEST

pytestmark = pytest.mark.timed

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def job(rank, world_size, directory, num_steps):
    """Collectives until the file `stop` is there; publishes the listener's port, returns times and counts."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    bagua.init_process_group(timeout=TIMEOUT_S)
    try:
        endpoint = bagua.distributed.world._world.endpoint
        step(rank, world_size)
        descriptors = len(os.listdir("/proc/self/fd"))
        publish(directory, rank, f"{endpoint.port} {endpoint.unix_name}")
        seconds = []
        while True:
            begin = time.monotonic()
            step(rank, world_size)
            seconds.append(time.monotonic() - begin)
            # All ranks leave at the same step: rank 0 decides.
            stop = torch.tensor([int(os.path.exists(f"{directory}/stop"))])
            bagua.broadcast(stop, 0)
            if stop.item() and len(seconds) >= num_steps:
                break
        deadline = time.monotonic() + TIMEOUT_S / 4
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < deadline:
            time.sleep(0.1)
        return seconds, descriptors, len(os.listdir("/proc/self/fd")), lines
    finally:
        bagua.destroy_process_group()
        logging.getLogger("bagua").removeHandler(handler)


def step(rank, world_size):
    x = torch.full((20_000,), float(rank))
    bagua.all_reduce(x)
    assert (x == world_size * (world_size - 1) / 2).all()
    y = torch.arange(1000.0) * world_size + rank
    bagua.all_reduce(y, codec="minmax_uint8")


def publish(directory, rank, text):
    with open(f"{directory}/rank{rank}.part", "w") as file:
        file.write(text)
    os.rename(f"{directory}/rank{rank}.part", f"{directory}/rank{rank}")


def listening(run: Run, directory, rank):
    """(port, name of the Unix socket) of a rank of the job."""
    deadline = time.monotonic() + TIMEOUT_S
    while not os.path.exists(f"{directory}/rank{rank}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with open(f"{directory}/rank{rank}") as file:
        port, _, unix_name = file.read().partition(" ")
    return int(port), unix_name


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="shm"), pytest.param({"BAGUA_SHARED_MEMORY": "0"}, id="tcp", marks=SAME_TEST)]
)
def test_a_thousand_connections_of_random_bytes(pool, tmp_path, env):
    run = pool.start(job, args=(str(tmp_path), 1), env=env)
    port, _ = listening(run, tmp_path, 0)
    garbage = send_garbage("127.0.0.1", port, connections=1000, seed=1, hold=0.1)
    (tmp_path / "stop").touch()
    results = run.result()
    assert garbage.connected == 1000
    for _, descriptors_before, descriptors_after, lines in results:
        assert descriptors_after <= descriptors_before
        assert len(lines) <= 12, lines
    assert results[0][3], "refused connections are logged"
    assert max(results[0][0]) < TIMEOUT_S / 4, "a step waited for unauthenticated peers"


@contextlib.contextmanager
def listening_until_stopped(rank, directory):
    """A rank that publishes its listener and waits for the file `stop`; it has no connections yet."""
    bagua.init_process_group(timeout=TIMEOUT_S)
    try:
        endpoint = bagua.distributed.world._world.endpoint
        publish(directory, rank, f"{endpoint.port} {endpoint.unix_name}")
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

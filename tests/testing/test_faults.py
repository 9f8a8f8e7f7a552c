"""bagua.testing.faults: each fault does what its name says, at the given rank and step."""

import signal
import socket
import threading

import pytest

from bagua.testing import InjectedFault, Pool, cont, fail_at, free_port, send_garbage, spawn, stop


def train(rank, world_size, fault):
    for step in range(4):
        fault(rank, step)
    return step


@pytest.mark.timed
@pytest.mark.parametrize(
    ("action", "end"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP), ("exit", 1)], ids=["kill", "stop", "exit"]
)
def test_fail_at_ends_one_rank(action, end):
    assert spawn(train, 2, args=(fail_at(1, 2, action),), expect_exit={1: end}) == [3, None]


def test_fail_at_raises_on_one_rank():
    with pytest.raises(InjectedFault, match="injected: rank 1 fails at step 2"):
        spawn(train, 2, args=(fail_at(1, 2),))


def test_fail_at_a_step_that_never_comes():
    assert spawn(train, 2, args=(fail_at(1, 4),)) == [3, 3]


def test_fail_at_refuses_an_unknown_action():
    with pytest.raises(ValueError, match="action is 'explode', expected one of raise, kill, stop, exit"):
        fail_at(0, 0, "explode")


@pytest.mark.timed
def test_stop_and_cont():
    with Pool(2) as pool:
        run = pool.start(lambda rank, world_size: stop() if rank == 1 else None)
        while not run.is_stopped(1):
            pass
        cont(run.pids[1])
        assert run.result() == [None, None]


class Listener:
    """A listener that accepts all connections and counts their bytes."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.socket.getsockname()[1]
        self.received = []
        self.silent = 0
        self.thread = threading.Thread(target=self.serve, name="listener")
        self.thread.start()

    def serve(self):
        sockets = []
        while True:
            sock, _ = self.socket.accept()
            sock.settimeout(0.05)
            data = b""
            try:
                while chunk := sock.recv(65536):
                    data += chunk
            except TimeoutError:
                self.silent += 1
                sockets.append(sock)
            if data == b"stop":
                break
            self.received.append(data)
        for sock in sockets:
            sock.close()

    def close(self):
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.sendall(b"stop")
        self.thread.join(timeout=10)
        self.socket.close()


def garbage_once(seed, connections=50):
    listener = Listener()
    try:
        done = send_garbage("127.0.0.1", listener.port, connections, seed, hold=0.1)
    finally:
        listener.close()
    return done, listener


@pytest.mark.timed
def test_send_garbage_sends_bytes_silence_and_nothing():
    done, listener = garbage_once(seed=1)
    assert (done.connected, done.refused) == (50, 0)
    assert sum(map(len, listener.received)) == done.sent_bytes > 10_000
    assert listener.silent > 0
    assert listener.received.count(b"") > listener.silent


@pytest.mark.timed
def test_send_garbage_repeats_itself_for_a_seed():
    first, second, other = (garbage_once(seed, connections=10) for seed in (2, 2, 3))
    assert first[1].received == second[1].received
    assert first[1].received != other[1].received


def test_send_garbage_counts_refusals():
    assert send_garbage("127.0.0.1", free_port(), 3, seed=1) == (0, 3, 0)

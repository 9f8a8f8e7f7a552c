"""Ctrl-C and other signals while a rank waits in a collective: Python's handlers run at once."""

import os
import signal
import threading
import time

import pytest
import torch

import bagua
from tests.communication.worlds import in_worlds, shm, tcp
from tests.faults.scenarios import process_group, spawn_in, watch

TIMEOUT_S = 20.0
PROMPTLY_S = 1.0  # a tenth of it on an idle machine


def signal_after(seconds, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def blocking(group):
    bagua.all_reduce(torch.ones(10))


def blocking_large(group):
    bagua.all_reduce(torch.ones(1_000_000))


def behind_another(group):
    work = bagua.barrier(async_op=True)
    bagua.all_reduce(torch.ones(10))
    work.wait()


def waiting(group):
    bagua.all_reduce(torch.ones(10), async_op=True).wait()


def receiving(group):
    bagua.recv(torch.ones(10), 1)


CALLS = {call.__name__: call for call in (blocking, blocking_large, behind_another, waiting, receiving)}


def interrupted(rank, world_size, name, connected):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with process_group(TIMEOUT_S):
        if connected:
            bagua.barrier()
        if rank != 0:
            time.sleep(1)
            return watch(bagua.barrier)
        begin = time.monotonic()
        signal_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](bagua.get_default_group())
        seconds = time.monotonic() - begin
        begin = time.monotonic()
        bagua.destroy_process_group()
        return seconds, time.monotonic() - begin


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("world", "connected"),
    [(shm(2), True), (tcp(2), True), (tcp(2), False), pytest.param(shm(2), False, marks=pytest.mark.slow)],
    ids=["shm, connected", "tcp, connected", "tcp, first contact", "shm, first contact"],
)
def test_ctrl_c(world, name, connected):
    (seconds, destroy_seconds), seen = spawn_in(world, interrupted, name, connected)
    assert 0.2 < seconds < 0.3 + PROMPTLY_S
    assert destroy_seconds < PROMPTLY_S
    assert seen.rank == 0 and (
        "interrupted" in seen.message
        or "destroyed the group" in seen.message
        or ("left the group" in seen.message or "cannot connect" in seen.message or "listens no more" in seen.message)
    ), seen


def interrupted_twice(rank, world_size):
    """The rank that dials is interrupted while the other one is stopped at the door."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with process_group(TIMEOUT_S):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        begin = time.monotonic()
        signal_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            bagua.barrier()
        return time.monotonic() - begin


@in_worlds([shm(2), tcp(2)])
def test_ctrl_c_while_dialing(world):
    seconds = spawn_in(world, interrupted_twice, expect_exit={0: signal.SIGSTOP})[1]
    assert 0.2 < seconds < 0.3 + PROMPTLY_S


class Enough(Exception):
    """What a handler of the user raises."""


def handlers(rank, world_size):
    with process_group(TIMEOUT_S):
        bagua.barrier()
        counted = []
        signal.signal(signal.SIGUSR2, lambda *_: counted.append(time.monotonic()))
        if rank == 0:
            # A handler that returns: the operation goes on.
            begin = time.monotonic()
            signal_after(0.2, signal.SIGUSR2)
            signal_after(0.4, signal.SIGUSR2)
            x = torch.ones(10)
            bagua.all_reduce(x)
            assert (x == 2).all() and len(counted) == 2 and counted[0] - begin < 0.2 + PROMPTLY_S

            def enough(*_):
                raise Enough("of this")

            # A handler that raises something of its own: that is what comes out.
            signal.signal(signal.SIGALRM, enough)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            begin = time.monotonic()
            with pytest.raises(Enough, match="of this"):
                bagua.all_reduce(x)
            assert time.monotonic() - begin < 0.3 + PROMPTLY_S
            with pytest.raises(bagua.Aborted, match="rank 0 was interrupted in the middle of an operation: Enough"):
                bagua.all_reduce(x)
            return None
        time.sleep(1.0)
        bagua.all_reduce(torch.ones(10))
        time.sleep(0.8)
        return watch(bagua.barrier)


def waits_in_a_handler(rank, world_size, name):
    with process_group(TIMEOUT_S):
        bagua.barrier()
        other = bagua.new_group([0, 1])
        if rank == 0:
            calls = {
                "same group": bagua.barrier,
                "another group": lambda: bagua.barrier(group=other),
                "later": lambda: bagua.barrier(group=other, async_op=True).wait(),
            }
            signal.signal(signal.SIGUSR2, lambda *_: calls[name]())
            signal_after(0.3, signal.SIGUSR2)
            begin = time.monotonic()
            with pytest.raises(bagua.InvalidArgument, match="a signal handler waits for an operation.*set a flag"):
                bagua.all_reduce(torch.ones(10))
            assert time.monotonic() - begin < 0.3 + PROMPTLY_S
            return None
        time.sleep(1.0)
        return watch(bagua.barrier)


@pytest.mark.parametrize("name", ["same group", "another group", "later"])
def test_a_handler_that_waits_is_refused(name):
    assert spawn_in(shm(2), waits_in_a_handler, name)[1].rank == 0


@in_worlds([shm(2), tcp(2)])
def test_handlers_run_and_may_raise(world):
    seen = spawn_in(world, handlers)[1]
    assert seen.kind == "RemoteError" and seen.rank == 0
    assert "rank 0 was interrupted in the middle of an operation: Enough" in seen.message

"""Ctrl-C and other signals while a rank waits in a collective: Python's handlers run at once."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch

import bagua
from tests.distributed.worlds import fast_in, in_worlds, shm, tcp
from tests.faults.scenarios import (
    NOTICED_S,
    note_time,
    process_group,
    spawn_in,
    wait_for_end,
    wait_for_note,
    watch,
)
from tests.meeting import meet

pytestmark = pytest.mark.timed

WAITED_S = 0.1  # in a call before the signal comes


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
    with process_group():
        if connected:
            bagua.barrier()
        meet()
        if rank != 0:
            meet()  # when the other one was interrupted and has left
            return watch(bagua.barrier)
        begin = time.monotonic()
        signal_after(WAITED_S)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](bagua.get_default_group())
        seconds = time.monotonic() - begin
        begin = time.monotonic()
        bagua.destroy_process_group()
        destroy_seconds = time.monotonic() - begin
        meet()
        return seconds, destroy_seconds


@fast_in(
    "world, before, name",
    [
        (shm(2), "connected", "blocking_large"),
        (tcp(2), "connected", "waiting"),
        (tcp(2), "first contact", "behind_another"),
        (tcp(2), "first contact", "receiving"),
    ],
    list(itertools.product([shm(2), tcp(2)], ["connected", "first contact"], CALLS)),
)
def test_ctrl_c(world, before, name):
    (seconds, destroy_seconds), seen = spawn_in(world, interrupted, name, before == "connected")
    assert WAITED_S <= seconds < WAITED_S + NOTICED_S
    assert destroy_seconds < NOTICED_S
    assert seen.rank == 0 and (
        "interrupted" in seen.message
        or "destroyed the group" in seen.message
        or ("left the group" in seen.message or "cannot connect" in seen.message or "no longer listens" in seen.message)
    ), seen


def interrupted_while_dialing(rank, world_size, path):
    """The rank that dials is interrupted while the other one is stopped at the door."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with process_group():
        meet()
        if rank == 0:
            note_time(path)
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_end(path)
        begin = time.monotonic()
        signal_after(WAITED_S)
        with pytest.raises(KeyboardInterrupt):
            bagua.barrier()
        return time.monotonic() - begin


@in_worlds([tcp(2)], slow=[shm(2)])
def test_ctrl_c_while_dialing(world, tmp_path):
    path = str(tmp_path / "stopped")
    seconds = spawn_in(world, interrupted_while_dialing, path, expect_exit={0: signal.SIGSTOP})[1]
    assert WAITED_S <= seconds < WAITED_S + NOTICED_S


class Enough(Exception):
    """What a handler of the user raises."""


def handlers(rank, world_size, path):
    with process_group():
        bagua.barrier()
        meet()
        counted = []

        def count(*_):
            counted.append(None)
            note_time(f"{path}{len(counted)}")

        signal.signal(signal.SIGUSR2, count)
        if rank == 0:
            # A handler that returns: the operation goes on, and ends, for the other rank waits for the handler.
            signal_after(WAITED_S, signal.SIGUSR2)
            signal_after(3 * WAITED_S, signal.SIGUSR2)
            x = torch.ones(10)
            bagua.all_reduce(x)
            assert (x == 2).all() and len(counted) == 2
            meet()

            def enough(*_):
                raise Enough("of this")

            # A handler that raises something of its own: that is what comes out.
            signal.signal(signal.SIGALRM, enough)
            begin = time.monotonic()
            with pytest.raises(Enough, match="of this"):
                signal.setitimer(signal.ITIMER_REAL, WAITED_S)
                bagua.all_reduce(x)
            assert WAITED_S <= time.monotonic() - begin < WAITED_S + NOTICED_S
            meet()
            with pytest.raises(bagua.Aborted, match="rank 0 was interrupted in the middle of an operation: Enough"):
                bagua.all_reduce(x)
            return None
        wait_for_note(f"{path}2")
        bagua.all_reduce(torch.ones(10))
        meet()
        meet()  # when the other one was interrupted
        return watch(bagua.barrier)


def waits_in_a_handler(rank, world_size, name):
    with process_group():
        other = bagua.new_group([0, 1])
        bagua.barrier()
        meet()
        if rank == 0:
            calls = {
                "same group": bagua.barrier,
                "another group": lambda: bagua.barrier(group=other),
                "later": lambda: bagua.barrier(group=other, async_op=True).wait(),
            }
            signal.signal(signal.SIGUSR2, lambda *_: calls[name]())
            begin = time.monotonic()
            with pytest.raises(bagua.InvalidArgument, match="a signal handler waits for an operation.*set a flag"):
                signal_after(WAITED_S, signal.SIGUSR2)
                bagua.all_reduce(torch.ones(10))
            assert time.monotonic() - begin < WAITED_S + NOTICED_S
            meet()
            return None
        meet()
        return watch(bagua.barrier)


@pytest.mark.parametrize("name", ["same group", "another group", "later"])
def test_a_handler_that_waits_is_refused(name):
    assert spawn_in(shm(2), waits_in_a_handler, name)[1].rank == 0


@in_worlds([tcp(2)], slow=[shm(2)])
def test_handlers_run_and_may_raise(world, tmp_path):
    seen = spawn_in(world, handlers, str(tmp_path / "handled"))[1]
    assert seen.kind == "RemoteError" and seen.rank == 0
    assert "rank 0 was interrupted in the middle of an operation: Enough" in seen.message

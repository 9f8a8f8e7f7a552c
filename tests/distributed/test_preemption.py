"""bagua.preemption: a signal of one rank is True on all ranks at the same call, and the launcher passes signals on."""

import os
import signal
import threading
import time

import pytest

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import spawn


def _signalled(rank, world_size, number):
    bagua.init_process_group()
    with pytest.raises(InvalidArgument, match="main thread"):
        _in_a_thread(bagua.preemption)
    got = []
    seen = []
    signal.signal(number, lambda *_: seen.append(number))  # the program's own goes on
    for step in range(6):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), number)
        if step == 5 and rank == 0:
            time.sleep(0.5)  # the other one closes its group meanwhile
        got.append(bagua.preemption())
    bagua.destroy_process_group()
    assert seen == [number] * (rank == 1)
    return got


def _in_a_thread(function):
    failure = []

    def run():
        try:
            function()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise failure[0]


def test_all_ranks_hear_at_the_same_call():
    """Of SIGTERM; SIGUSR1 stops the program of tests/examples/test_launch.py."""
    assert spawn(_signalled, 2, args=(signal.SIGTERM,)) == [[False, False, False, True, True, True]] * 2


def _fails_after_a_call(rank, world_size):
    bagua.init_process_group(timeout=300)
    bagua.preemption()
    if rank == 1:
        bagua.destroy_process_group()  # as at the exit of a program that has raised
        return
    with pytest.raises(bagua.BaguaError, match="rank 1"):
        bagua.barrier()
    bagua.destroy_process_group()


def test_a_rank_that_ends_does_not_wait_for_the_others_for_long():
    spawn(_fails_after_a_call, 2, timeout=60)

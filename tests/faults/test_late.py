"""Ranks that are stopped, late, exited or elsewhere: the deadline names the culprit and what it does instead."""

import atexit
import itertools
import os
import signal
import threading
import time

import pytest
import torch

import bagua
from bagua.testing import stop
from tests.distributed.worlds import SAME_TEST, fast_in, in_worlds, mixed, shm, tcp
from tests.faults.scenarios import (
    LONG_S,
    NOTICED_S,
    OPERATIONS,
    check_patience,
    note_time,
    noted_time,
    process_group,
    spawn_in,
    wait_for_end,
    watch,
)
from tests.meeting import meet

pytestmark = pytest.mark.timed

TIMEOUT_S = 0.5
CULPRIT = 2


def be_stopped(rank, world_size, operation, path):
    with process_group() as group:
        call = OPERATIONS[operation]()
        call()
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == CULPRIT:
            note_time(path)
            stop()
        wait_for_end(path)
        return watch(call)


@fast_in(
    "world, operation",
    [(shm(3), "shared")],
    list(itertools.product([shm(3), tcp(3), mixed(4)], ["small", "shared", "coded"])),
)
def test_a_stopped_rank(world, operation, tmp_path):
    arguments = (operation, str(tmp_path / "stopped"))
    results = spawn_in(world, be_stopped, *arguments, expect_exit={CULPRIT: signal.SIGSTOP})
    check_the_stopped(results)


def check_the_stopped(results, culprit=CULPRIT):
    survivors = [seen for rank, seen in enumerate(results) if rank != culprit]
    for seen in survivors:
        assert seen.rank == culprit and f"rank {culprit} " in seen.message, seen
        assert seen.again_seconds < TIMEOUT_S and seen.destroy_seconds < TIMEOUT_S, seen
    check_patience(survivors, TIMEOUT_S)
    assert any("does not answer: its process is stopped or its host is unreachable" in s.message for s in survivors)


def be_stopped_before_first_contact(rank, world_size, culprit, path):
    with process_group() as group:
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == culprit:
            note_time(path)
            stop()
        wait_for_end(path)
        return watch(bagua.barrier)


@fast_in("world, culprit", [(shm(3), 0)], list(itertools.product([shm(3), tcp(3)], [0, 2])))
def test_a_rank_that_is_stopped_before_the_first_contact(world, culprit, tmp_path):
    path = str(tmp_path / "stopped")
    results = spawn_in(world, be_stopped_before_first_contact, culprit, path, expect_exit={culprit: signal.SIGSTOP})
    survivors = [seen for rank, seen in enumerate(results) if rank != culprit]
    assert [seen.rank for seen in survivors] == [culprit] * 2, survivors
    check_patience(survivors, TIMEOUT_S)


def be_late(rank, world_size):
    with process_group() as group:
        x = torch.ones(10)
        for _ in range(3):
            bagua.all_reduce(x)
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == CULPRIT:
            meet()  # when the others have failed and left
            return watch(lambda: bagua.all_reduce(torch.ones(7)))
        seen = watch(lambda: bagua.all_reduce(torch.ones(7)))
        meet()
        return seen


def check_the_late(results):
    for rank, seen in enumerate(results):
        assert seen.rank == CULPRIT, (rank, seen)
        assert f"rank {CULPRIT} has not called it; its last was all_reduce #3 of 10 float32 (SUM)" in seen.message
        assert "all_reduce #4 of 7 float32" in seen.message
    late = results.pop(CULPRIT)
    assert late.at - late.began < TIMEOUT_S, "it learns what the others found, and waits for nobody"
    check_patience(results, TIMEOUT_S)


@in_worlds([mixed(4)], slow=[shm(3), tcp(3)])
def test_a_late_rank_is_named_with_what_it_did_last(world):
    check_the_late(spawn_in(world, be_late))


def never_calls(rank, world_size, hold_interpreter):
    with process_group() as group:
        bagua.barrier()
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank != CULPRIT:
            seen = watch(lambda: bagua.broadcast(torch.ones(3), CULPRIT))
            meet()
            return seen
        others_have_failed = threading.Thread(target=meet)
        others_have_failed.start()
        while hold_interpreter and others_have_failed.is_alive():
            sum(range(1_000_000))  # native code that does not let go of the lock
        others_have_failed.join()
        return None


@pytest.mark.parametrize(
    "hold_interpreter", [pytest.param(False, id="sleeping", marks=SAME_TEST), pytest.param(True, id="busy")]
)
def test_a_rank_that_never_calls(hold_interpreter):
    for seen in spawn_in(shm(3), never_calls, hold_interpreter)[:2]:
        assert seen.rank == CULPRIT
        assert (
            f"rank {CULPRIT} has not called it; its last was barrier #1, and it is not in a collective" in seen.message
        )


def leave(rank, world_size, how, path):
    bagua.init_process_group(timeout=LONG_S)
    call = OPERATIONS["small"]()
    if rank == CULPRIT:
        for _ in range(3):
            call()
        note_time(path)
        if how == "destroy":
            bagua.destroy_process_group()
            return None
        if how == "exit":  # what the interpreter does at the end of a program
            atexit._run_exitfuncs()
        os._exit(0)
    return watch(call)


@fast_in(
    "world, how",
    [(shm(3), "destroy"), (tcp(3), "exit"), (mixed(4), "_exit")],
    list(itertools.product([shm(3), tcp(3), mixed(4)], ["destroy", "exit", "_exit"])),
)
def test_a_rank_that_leaves_while_others_wait(world, how, tmp_path):
    path = str(tmp_path / "left")
    expect_exit = None if how == "destroy" else {CULPRIT: 0}
    for rank, seen in enumerate(spawn_in(world, leave, how, path, expect_exit=expect_exit)):
        if rank == CULPRIT:
            continue
        assert seen.rank == CULPRIT, seen
        assert ("left the group 'world'" in seen.message) == (how != "_exit"), seen
        assert ("without leaving the group: its process died" in seen.message or "connection" in seen.message) == (
            how == "_exit"
        ), seen
        assert seen.at - noted_time(path) < NOTICED_S, seen


def leave_a_receiver(rank, world_size, path):
    with process_group():
        x = torch.zeros(4)
        if rank == 1:
            bagua.send(torch.ones(4), 0)
            note_time(path)
            return None  # says goodbye
        bagua.recv(x, 1)  # what it sent before still comes
        assert x.tolist() == [1.0] * 4
        return watch(lambda: bagua.recv(x, 1))


@in_worlds([tcp(2)], slow=[shm(2)])
def test_a_rank_that_leaves_a_receiver(world, tmp_path):
    path = str(tmp_path / "left")
    seen, _ = spawn_in(world, leave_a_receiver, path)
    assert seen.rank == 1 and "rank 1 left the group 'world" in seen.message, seen
    assert seen.at - noted_time(path) < NOTICED_S, seen


def raises_in_the_middle(rank, world_size):
    bagua.init_process_group(timeout=LONG_S)
    try:
        bagua.barrier()
        meet()
        if rank == CULPRIT:
            raise KeyError("a mistake of the user's")
        return watch(OPERATIONS["large"]())
    except KeyError:
        return None
    finally:
        bagua.destroy_process_group()


def test_a_rank_that_raises_and_cleans_up():
    for seen in spawn_in(shm(3), raises_in_the_middle)[:2]:
        assert seen.rank == CULPRIT and "left the group 'world'" in seen.message and "see its log" in seen.message


def destroys_with_work_pending(rank, world_size):
    bagua.init_process_group(timeout=LONG_S)
    bagua.barrier()
    meet()
    if rank == CULPRIT:
        works = [bagua.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
        begin = time.monotonic()
        bagua.destroy_process_group()
        assert time.monotonic() - begin < NOTICED_S
        meet()
        for work in works:
            with pytest.raises(
                bagua.Aborted, match=r"destroyed the group 'world' with \d+ operations pending; wait for"
            ):
                work.wait()
        return None
    meet()
    return watch(bagua.barrier)


def test_destroy_with_operations_pending():
    for seen in spawn_in(shm(3), destroys_with_work_pending)[:2]:
        assert seen.rank == CULPRIT and "destroyed the group 'world' with" in seen.message


def a_slow_chain(rank, world_size):
    """Rank 0 waits for 1, which waits for 2, which sleeps: it is 2 whom everybody names."""
    with process_group() as group:
        bagua.barrier()
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == 2:
            meet()  # when the others have failed
            return None
        x = torch.ones(10)
        seen = watch(lambda: bagua.reduce(x, 0))
        meet()
        return seen


@in_worlds([], slow=[shm(3), tcp(3)])
def test_the_end_of_a_chain_is_named(world):
    for seen in spawn_in(world, a_slow_chain)[:2]:
        assert seen.rank == 2, seen

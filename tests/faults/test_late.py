"""Ranks that are stopped, late, gone or somewhere else: the deadline names the culprit and what it does instead."""

import atexit
import os
import signal
import time

import pytest
import torch

import bagua
from bagua.testing import stop
from tests.communication.worlds import in_worlds, mixed, shm, tcp
from tests.faults.scenarios import OPERATIONS, note_time, noted_time, process_group, spawn_in, watch

TIMEOUT_S = 1.0
SLACK_S = 1.0  # for a loaded machine, on top of what the design promises: twice the timeout
CULPRIT = 2


def be_stopped(rank, world_size, operation, path):
    with process_group(TIMEOUT_S):
        call = OPERATIONS[operation]()
        call()
        bagua.barrier()
        if rank == CULPRIT:
            note_time(path)
            stop()
        return watch(call)


@pytest.mark.parametrize("operation", ["small", "shared", "coded"])
@in_worlds([shm(3), mixed(4)], slow=[tcp(3)])
def test_a_stopped_rank(world, operation, tmp_path):
    path = str(tmp_path / "stopped")
    results = spawn_in(world, be_stopped, operation, path, expect_exit={CULPRIT: signal.SIGSTOP})
    stopped_at = noted_time(path)
    for rank, seen in enumerate(results):
        if rank == CULPRIT:
            continue
        assert seen.rank == CULPRIT, seen
        assert f"rank {CULPRIT} does not answer: its process is stopped" in seen.message or (
            f"rank {CULPRIT}" in seen.message
        )
        assert 0.8 * TIMEOUT_S < seen.at - stopped_at < 2 * TIMEOUT_S + SLACK_S, seen
        assert seen.again_seconds < 1 and seen.destroy_seconds < 1, seen
    assert any("does not answer: its process is stopped or its host is unreachable" in s.message for s in results if s)


def be_stopped_before_first_contact(rank, world_size, culprit, path):
    with process_group(TIMEOUT_S):
        if rank == culprit:
            note_time(path)
            stop()
        time.sleep(0.2)
        return watch(bagua.barrier)


@pytest.mark.parametrize("culprit", [0, 2])
@in_worlds([tcp(3)], slow=[shm(3)])
def test_a_rank_that_is_stopped_before_the_first_contact(world, culprit, tmp_path):
    path = str(tmp_path / "stopped")
    results = spawn_in(world, be_stopped_before_first_contact, culprit, path, expect_exit={culprit: signal.SIGSTOP})
    for rank, seen in enumerate(results):
        if rank != culprit:
            assert seen.rank == culprit, seen
            assert seen.at - noted_time(path) < 2 * TIMEOUT_S + SLACK_S, seen


def be_late(rank, world_size, path):
    with process_group(TIMEOUT_S):
        x = torch.ones(10)
        for _ in range(3):
            bagua.all_reduce(x)
        if rank == CULPRIT:
            time.sleep(2 * TIMEOUT_S + SLACK_S)  # in Python, with the interpreter free
        begin = time.monotonic()
        seen = watch(lambda: bagua.all_reduce(torch.ones(7)))
        return seen, seen.at - begin


@in_worlds([tcp(3), mixed(4)], slow=[shm(3)])
def test_a_late_rank_is_named_with_what_it_did_last(world, tmp_path):
    results = spawn_in(world, be_late, str(tmp_path))
    for rank, (seen, seconds) in enumerate(results):
        assert seen.rank == CULPRIT, (rank, seen)
        assert f"rank {CULPRIT} has not called it; its last was all_reduce #3 of 10 float32 (SUM)" in seen.message
        assert "all_reduce #4 of 7 float32" in seen.message
        if rank == CULPRIT:
            assert seconds < 0.5, "it learns at once what the others found"
        else:
            assert 0.8 * TIMEOUT_S < seconds < 2 * TIMEOUT_S + SLACK_S, (rank, seen)


def never_calls(rank, world_size, hold_interpreter):
    with process_group(TIMEOUT_S):
        bagua.barrier()
        if rank == CULPRIT:
            if hold_interpreter:  # native code that does not let go of the lock
                deadline = time.monotonic() + 2 * TIMEOUT_S + SLACK_S
                while time.monotonic() < deadline:
                    sum(range(1_000_000))
            else:
                time.sleep(2 * TIMEOUT_S + SLACK_S)
            return None
        return watch(lambda: bagua.broadcast(torch.ones(3), CULPRIT))


@pytest.mark.parametrize("hold_interpreter", [False, True], ids=["sleeping", "busy"])
def test_a_rank_that_never_calls(hold_interpreter):
    for seen in spawn_in(shm(3), never_calls, hold_interpreter)[:2]:
        assert seen.rank == CULPRIT
        assert (
            f"rank {CULPRIT} has not called it; its last was barrier #1, and it is not in a collective" in seen.message
        )


def leave(rank, world_size, how, path):
    bagua.init_process_group(timeout=20.0)
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


@pytest.mark.parametrize("how", ["destroy", "exit", "_exit"])
@in_worlds([shm(3), tcp(3), mixed(4)])
def test_a_rank_that_leaves_while_others_wait(world, how, tmp_path):
    path = str(tmp_path / "left")
    expect_exit = None if how == "destroy" else {CULPRIT: 0}
    for rank, seen in enumerate(spawn_in(world, leave, how, path, expect_exit=expect_exit)):
        if rank == CULPRIT:
            continue
        assert seen.rank == CULPRIT, seen
        assert ("left the group 'world'" in seen.message) == (how != "_exit"), seen
        assert ("without a goodbye: its process died" in seen.message or "connection" in seen.message) == (
            how == "_exit"
        ), seen
        assert seen.at - noted_time(path) < 5, seen


def leave_a_receiver(rank, world_size, path):
    with process_group(20.0):
        x = torch.zeros(4)
        if rank == 1:
            bagua.send(torch.ones(4), 0)
            note_time(path)
            return None  # says goodbye
        bagua.recv(x, 1)  # what it sent before still comes
        assert x.tolist() == [1.0] * 4
        return watch(lambda: bagua.recv(x, 1))


@in_worlds([shm(2), tcp(2)])
def test_a_rank_that_leaves_a_receiver(world, tmp_path):
    path = str(tmp_path / "left")
    seen, _ = spawn_in(world, leave_a_receiver, path)
    assert seen.rank == 1 and "rank 1 left the group 'world" in seen.message, seen
    assert seen.at - noted_time(path) < 5, seen


def raises_in_the_middle(rank, world_size):
    bagua.init_process_group(timeout=20.0)
    try:
        bagua.barrier()
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
    bagua.init_process_group(timeout=20.0)
    bagua.barrier()
    if rank == CULPRIT:
        time.sleep(0.2)  # the barrier says that the others have come, not that they have left it
        works = [bagua.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
        begin = time.monotonic()
        bagua.destroy_process_group()
        assert time.monotonic() - begin < 1
        for work in works:
            with pytest.raises(
                bagua.Aborted, match=r"destroyed the group 'world' with \d+ operations pending; wait for"
            ):
                work.wait()
        return None
    time.sleep(0.5)
    return watch(bagua.barrier)


def test_destroy_with_operations_pending():
    for seen in spawn_in(shm(3), destroys_with_work_pending)[:2]:
        assert seen.rank == CULPRIT and "destroyed the group 'world' with" in seen.message


def a_slow_chain(rank, world_size):
    """Rank 0 waits for 1, which waits for 2, which sleeps: it is 2 whom everybody names."""
    with process_group(TIMEOUT_S):
        bagua.barrier()
        if rank == 2:
            time.sleep(2 * TIMEOUT_S + SLACK_S)
            return None
        x = torch.ones(10)
        return watch(lambda: bagua.reduce(x, 0))


@in_worlds([tcp(3)], slow=[shm(3)])
def test_the_end_of_a_chain_is_named(world):
    for seen in spawn_in(world, a_slow_chain)[:2]:
        assert seen.rank == 2, seen

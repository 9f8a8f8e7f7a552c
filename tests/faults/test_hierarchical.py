"""Failures under all_reduce(hierarchical=True) between nodes of unequal size: its stages are among parts of the group,
but what everybody is told names ranks, operations and group as the caller knows them."""

import signal
import time

import pytest
import torch

import bagua
from bagua.testing import kill, stop
from tests.communication.worlds import WorldKind
from tests.faults.scenarios import die_in_the_middle, note_time, noted_time, process_group, repeat, spawn_in, watch
from tests.faults.test_killed import check_survivors

# Ranks 0 and 1; 2, 3 and 4. The leaders are 0 and 2.
WORLD = WorldKind("unequal5", 5, nodes=(2, 3), env={"BAGUA_SOCKET_IFNAME": "lo"})
TIMEOUT_S = 8.0
SHORT_S = 1.0
SLACK_S = 1.0
_STOPPED = "does not answer: its process is stopped or its host is unreachable"


def hierarchical(numel=300_000):
    return repeat(torch.ones(numel), lambda x: bagua.all_reduce(x, hierarchical=True))


def die_in_a_stage(rank, world_size, victim, path):
    with process_group(TIMEOUT_S):
        call = hierarchical()
        call()
        if rank == victim:
            die_in_the_middle(call, path)
        return watch(call)


@pytest.mark.parametrize("victim", [0, 1, 2, 4])
def test_kill(victim, tmp_path):
    path = str(tmp_path / "died")
    results = spawn_in(WORLD, die_in_a_stage, victim, path, expect_exit={victim: signal.SIGKILL})
    check_survivors(results, noted_time(path), victim)


def die_between_calls(rank, world_size, victim, path):
    with process_group(TIMEOUT_S):
        call = hierarchical()
        call()
        if rank == victim:
            note_time(path)
            kill()
        time.sleep(0.5)
        return watch(call)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_death_between_calls(victim, tmp_path):
    """Ranks of the other node have no connection to it; those that have tell them."""
    path = str(tmp_path / "died")
    results = spawn_in(WORLD, die_between_calls, victim, path, expect_exit={victim: signal.SIGKILL})
    check_survivors(results, noted_time(path), victim)


def be_stopped_or_late(rank, world_size, culprit, stops, num_before, path):
    with process_group(SHORT_S):
        call = hierarchical(1000)
        for _ in range(num_before):
            call()
        if rank == culprit:
            note_time(path)
            if stops:
                stop()
            time.sleep(2 * SHORT_S + SLACK_S)
        return watch(call)


@pytest.mark.parametrize(
    ("culprit", "stops", "num_before"),
    [(2, True, 0), (4, False, 0), (2, False, 3), (4, True, 3)],
    ids=["leader stopped, unconnected", "member late, unconnected", "leader late", "member stopped"],
)
def test_a_rank_that_does_not_come(culprit, stops, num_before, tmp_path):
    path = str(tmp_path / "since")
    expect_exit = {culprit: signal.SIGSTOP} if stops else None
    last = f"its last was all_reduce #{num_before} of" if num_before else "and has finished none before"
    whats = [f"rank {culprit} " + (_STOPPED if stops else f"has not called it; {last}")]
    if stops and not num_before:
        whats.append(f"cannot connect to rank {culprit} at")
    results = spawn_in(WORLD, be_stopped_or_late, culprit, stops, num_before, path, expect_exit=expect_exit)
    for rank, seen in enumerate(results):
        if stops and rank == culprit:
            continue
        assert seen.rank == culprit, (rank, seen)
        assert f"rank {culprit}" in seen.message and "group 'world'" in seen.message, seen
        assert f"all_reduce #{num_before + 1} of 1000 float32 (SUM), hierarchical" in seen.message, seen
        if rank != culprit:
            assert 0.8 * SHORT_S < seen.at - noted_time(path) < 2 * SHORT_S + SLACK_S, (rank, seen)
    messages = [seen.message for seen in results if seen]
    assert any(what in message for what in whats for message in messages), messages


def call_something_else(rank, world_size, odd_one):
    with process_group(TIMEOUT_S):
        call = hierarchical(1000)
        call()
        time.sleep(0.5)  # until the first call has ended everywhere
        return watch((lambda: bagua.all_reduce(torch.ones(999), hierarchical=True)) if rank == odd_one else call)


@pytest.mark.parametrize("odd_one", [0, 4])
def test_ranks_that_call_different_things(odd_one):
    for seen in spawn_in(WORLD, call_something_else, odd_one):
        for numel in (999, 1000):
            assert f"all_reduce #2 of {numel} float32 (SUM), hierarchical" in seen.message, seen
        assert "all ranks of a group must make the same calls" in seen.message, seen

"""Failures under hierarchical=True between nodes of unequal size: its stages are among parts of the group, but what
everybody is told names ranks, operations and group as the caller knows them."""

import itertools
import signal

import pytest
import torch

import bagua
from bagua.testing import kill, stop
from tests.distributed.worlds import WorldKind, fast_in
from tests.faults.scenarios import (
    check_patience,
    die_in_the_middle,
    note_time,
    noted_time,
    process_group,
    repeat,
    spawn_in,
    wait_for_end,
    watch,
)
from tests.faults.test_killed import check_survivors
from tests.meeting import meet

pytestmark = pytest.mark.timed

# Ranks 0 and 1; 2, 3 and 4. The leaders are 0 and 2.
WORLD = WorldKind("unequal5", 5, nodes=(2, 3), env={"BAGUA_SOCKET_IFNAME": "lo"})
# Rank 0 alone; 1 and 2. In none of its parts but the world has rank 1 or 2 its own number.
SMALL = WorldKind("unequal3", 3, nodes=(1, 2), env={"BAGUA_SOCKET_IFNAME": "lo"})
TIMEOUT_S = 0.5
_STOPPED = "does not answer: its process is stopped or its"


OPERATIONS = {
    "all_reduce": lambda x: bagua.all_reduce(x, hierarchical=True),
    "coded": lambda x: bagua.all_reduce(x, bagua.ReduceOp.AVG, codec="minmax_uint8", hierarchical=True),
    "neighbor_average": lambda x: bagua.neighbor_average(x, "shift_one", 5, hierarchical=True),
}
# How messages name the n-th of them.
CALLED = {
    "all_reduce": "all_reduce #{} of 1000 float32 (SUM), hierarchical",
    "coded": "all_reduce #{} of 1000 float32 (AVG) with codec minmax_uint8, hierarchical",
    "neighbor_average": "neighbor_average #{} of 1000 float32 in topology shift_one at step 5, hierarchical",
}


def hierarchical(numel=300_000, operation="all_reduce"):
    return repeat(torch.ones(numel), OPERATIONS[operation])


def die_in_a_stage(rank, world_size, victim, path, operation="all_reduce"):
    with process_group():
        call = hierarchical(operation=operation)
        call()
        meet()
        if rank == victim:
            die_in_the_middle(call, path)
        return watch(call)


@fast_in("victim", [], range(5))
def test_kill(victim, tmp_path):
    path = str(tmp_path / "died")
    results = spawn_in(WORLD, die_in_a_stage, victim, path, expect_exit={victim: signal.SIGKILL})
    check_survivors(results, noted_time(path), victim)


@fast_in(
    "operation, victim",
    [("neighbor_average", 0)],
    list(itertools.product(["coded", "neighbor_average"], range(3))),
)
def test_kill_in_other_operations(operation, victim, tmp_path):
    path = str(tmp_path / "died")
    results = spawn_in(SMALL, die_in_a_stage, victim, path, operation, expect_exit={victim: signal.SIGKILL})
    check_survivors(results, noted_time(path), victim)
    name = "neighbor_average" if operation == "neighbor_average" else "all_reduce"
    for seen in results:
        assert seen is None or seen.operation in (name, None), seen


def die_between_calls(rank, world_size, victim, path):
    with process_group():
        call = hierarchical()
        call()
        meet()
        if rank == victim:
            note_time(path)
            kill()
        wait_for_end(path)
        return watch(call)


@fast_in("victim", [2], range(5))
def test_a_death_between_calls(victim, tmp_path):
    """Ranks of the other node have no connection to it; those that have tell them."""
    path = str(tmp_path / "died")
    results = spawn_in(WORLD, die_between_calls, victim, path, expect_exit={victim: signal.SIGKILL})
    check_survivors(results, noted_time(path), victim)


def be_stopped_or_late(rank, world_size, culprit, stops, num_before, path, operation="all_reduce"):
    """The culprit comes when the others have failed and left, if it comes at all."""
    with process_group() as group:
        call = hierarchical(1000, operation)
        for _ in range(num_before):
            call()
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == culprit:
            if stops:
                note_time(path)
                stop()
            meet()
            return watch(call)
        if stops:
            wait_for_end(path)
        seen = watch(call)
        if not stops:
            meet()
        return seen


# Ranks 2 and 4: a leader and a member.
@fast_in(
    "culprit, how, num_before",
    [(2, "stopped", 0)],
    list(itertools.product([2, 4], ["stopped", "late"], [0, 3])),
)
def test_a_rank_that_does_not_come(culprit, how, num_before, tmp_path):
    check_names(WORLD, culprit, how, num_before, "all_reduce", str(tmp_path / "since"))


# Rank 0 is the only one of its node, 1 is a leader, 2 a member.
@fast_in(
    "operation, culprit, how, num_before",
    [("coded", 0, "late", 2)],
    [
        (operation, *case)
        for operation in ("coded", "neighbor_average")
        for case in ((0, "late", 2), (1, "late", 0), (2, "stopped", 2))
    ],
)
def test_a_rank_that_does_not_come_in_other_operations(operation, culprit, how, num_before, tmp_path):
    check_names(SMALL, culprit, how, num_before, operation, str(tmp_path / "since"))


def check_names(world, culprit, how, num_before, operation, path):
    """Everybody names the culprit and the operation as it was called; somebody says what the culprit does instead."""
    stops, called = how == "stopped", CALLED[operation]
    expect_exit = {culprit: signal.SIGSTOP} if stops else None
    last = f"its last was {called.format(num_before)}" if num_before else "it has finished none before"
    whats = [f"rank {culprit} " + (_STOPPED if stops else f"has not called it; {last}")]
    arguments = (culprit, stops, num_before, path, operation)
    results = spawn_in(world, be_stopped_or_late, *arguments, expect_exit=expect_exit)
    for rank, seen in enumerate(results):
        if stops and rank == culprit:
            continue
        assert seen.rank == culprit, (rank, seen)
        assert f"rank {culprit}" in seen.message and "group 'world'" in seen.message, seen
        assert called.format(num_before + 1) in seen.message, seen
    check_patience([seen for rank, seen in enumerate(results) if rank != culprit], TIMEOUT_S)
    messages = [seen.message for seen in results if seen]
    assert any(what in message for what in whats for message in messages), messages


def call_something_else(rank, world_size, odd_one):
    with process_group():
        call = hierarchical(1000)
        call()
        meet()
        return watch((lambda: bagua.all_reduce(torch.ones(999), hierarchical=True)) if rank == odd_one else call)


@fast_in("odd_one", [4], [0, 4])
def test_ranks_that_call_different_things(odd_one):
    for seen in spawn_in(WORLD, call_something_else, odd_one):
        for numel in (999, 1000):
            assert f"all_reduce #2 of {numel} float32 (SUM), hierarchical" in seen.message, seen
        assert "all ranks of a group must make the same calls" in seen.message, seen

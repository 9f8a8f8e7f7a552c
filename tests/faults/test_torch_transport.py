"""The faults of the other files over backend="torch": what torch does with a lost rank shows nowhere."""

import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.testing import spawn
from tests.distributed.worlds import Pools, fast_in, through_torch
from tests.faults.scenarios import NOTICED_S, noted_time, process_group, spawn_in, watch
from tests.faults.test_killed import VICTIM, check_survivors, die_between, die_in
from tests.faults.test_late import (
    CULPRIT,
    TIMEOUT_S,
    a_slow_chain,
    be_late,
    be_stopped,
    check_the_late,
    check_the_stopped,
    destroys_with_work_pending,
    leave,
)
from tests.faults.test_mismatch import MISMATCHES, QUICKLY_S, connected_group, differ, swap
from tests.meeting import meet

pytestmark = pytest.mark.timed

WORLD = through_torch(3)


@fast_in("operation", ["coded"], ["small", "large", "coded"])
def test_kill_in_mid_collective(operation, tmp_path):
    path = str(tmp_path / "died")
    check_survivors(spawn_in(WORLD, die_in, operation, path, expect_exit={VICTIM: signal.SIGKILL}), noted_time(path))


@pytest.mark.slow("test_kill_in_mid_collective")
def test_a_death_between_calls_is_known_at_the_next_one(tmp_path):
    path = str(tmp_path / "died")
    check_survivors(spawn_in(WORLD, die_between, path, expect_exit={VICTIM: signal.SIGKILL}), noted_time(path))


@fast_in("operation", [], ["small", "coded"])
def test_a_stopped_rank(operation, tmp_path):
    arguments = (operation, str(tmp_path / "stopped"))
    results = spawn_in(WORLD, be_stopped, *arguments, expect_exit={CULPRIT: signal.SIGSTOP})
    check_the_stopped(results)
    assert any(seen.kind == "DeadlineExceeded" for seen in filter(None, results))


@pytest.mark.slow("test_a_late_rank_is_named_with_what_it_did_last")
def test_a_late_rank_is_named_with_what_it_did_last():
    check_the_late(spawn_in(WORLD, be_late))


@pytest.mark.slow("test_the_end_of_a_chain_is_named")
def test_the_end_of_a_chain_is_named():
    assert [seen.rank for seen in spawn_in(WORLD, a_slow_chain)[:2]] == [2, 2]


@fast_in("how", [], ["destroy", "exit", "_exit"])
def test_a_rank_that_leaves_while_others_wait(how, tmp_path):
    path = str(tmp_path / "left")
    expect_exit = None if how == "destroy" else {CULPRIT: 0}
    for rank, seen in enumerate(spawn_in(WORLD, leave, how, path, expect_exit=expect_exit)):
        if rank != CULPRIT:
            assert seen.rank == CULPRIT and seen.at - noted_time(path) < NOTICED_S, seen


@pytest.mark.slow("test_destroy_with_operations_pending")
def test_destroy_with_operations_pending():
    for seen in spawn_in(WORLD, destroys_with_work_pending)[:2]:
        assert seen.rank == CULPRIT and "destroyed the group 'world' with" in seen.message


@pytest.mark.slow("test_both_sides_are_shown_on_every_rank")
def test_mismatches_show_both_sides_on_every_rank():
    pools = Pools()
    try:
        results = pools.run(WORLD, differ, list(MISMATCHES), timeout=100)
        swapped = pools.run(WORLD, swap)
    finally:
        pools.close()
    for name, (_, _, shown) in MISMATCHES.items():
        for rank, seen in enumerate(results):
            messages, seconds = seen[name]
            assert messages and seconds < QUICKLY_S, f"{name}: rank {rank}: {messages} after {seconds:.1f} s"
            kind, _, text = messages[0]
            assert kind in ("InvalidArgument", "RemoteError") and all(part in text for part in shown), (name, text)
    assert all("all_reduce #2 of 10 float32" in text and "broadcast #2 of 20 float32" in text for text in swapped)


def differ_in_frames(rank, world_size):
    """Frames of sizes that do not fit must not meet: torch would break the connections under the other groups."""
    group = connected_group()
    with pytest.raises(bagua.BaguaError) as caught:
        group.all_reduce(torch.ones(3_000_000 if rank == 1 else 100_000)).wait()
    for _ in range(3):
        x = torch.ones(100_000)
        bagua.all_reduce(x)
        assert (x == world_size).all()
    return str(caught.value)


def test_frames_of_different_sizes_do_not_meet():
    pools = Pools()
    try:
        messages = pools.run(WORLD, differ_in_frames)
    finally:
        pools.close()
    assert all("of 3000000 float32" in text and "of 100000 float32" in text for text in messages)


def forwarding():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-torch-")]


def fail_and_start_again(rank, world_size):
    """A failed world leaves nothing in the way of the next one, nor a thread: it broke the connections it had made."""
    counts = []
    for fails in (False, True):
        with process_group() as group:
            bagua.barrier()
            meet()
            group.set_timeout(TIMEOUT_S)
            if fails and rank == 0:
                assert watch(lambda: bagua.all_reduce(torch.ones(50_000))).rank == 1
                assert not forwarding(), "while the other rank is still there"
            meet()
        with process_group():
            x = torch.ones(50_000)
            bagua.all_reduce(x)
            assert (x == world_size).all(), fails
        counts.append(threading.active_count())
    return counts


def test_a_new_world_after_a_failed_one():
    for counts in spawn(fail_and_start_again, 2, env=WORLD.env):
        assert len(set(counts)) == 1, counts


def fail_on_a_group_of_the_program(rank, world_size):
    """What a failure leaves in the program's own group neither disturbs that group nor bagua's next one."""
    dist.init_process_group("gloo")
    with process_group() as group:
        bagua.barrier()
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == 0:
            assert watch(lambda: bagua.all_reduce(torch.ones(50_000))).rank == 1
        meet()
    x = torch.ones(50_000)
    dist.all_reduce(x)
    with process_group():
        bagua.all_reduce(x)
    dist.all_reduce(x)
    assert (x == world_size**3).all()
    begin = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - begin


def test_a_failure_on_a_group_of_the_program():
    assert max(spawn(fail_on_a_group_of_the_program, 2, env=WORLD.env)) < NOTICED_S

"""kill -9 in the middle of a collective: every other rank raises long before its deadline and names the dead rank."""

import contextlib
import itertools
import os
import signal
import threading
import time

import pytest
import torch

import bagua
from bagua.testing import Pool, kill
from tests.distributed.worlds import fast_in, in_worlds, mixed, shm, tcp
from tests.faults.scenarios import (
    LONG_S,
    NOTICED_S,
    OPERATIONS,
    WORLDS,
    die_in_the_middle,
    note_time,
    noted_time,
    process_group,
    process_state,
    spawn_in,
    wait_for_end,
    watch,
)
from tests.meeting import meet

pytestmark = pytest.mark.timed

VICTIM = 1


def die_in(rank, world_size, operation, path):
    with process_group():
        call = OPERATIONS[operation]()
        call()
        meet()
        if rank == VICTIM:
            die_in_the_middle(call, path)
        return watch(call)


def check_survivors(results, died_at, victim=VICTIM):
    survivors = [seen for rank, seen in enumerate(results) if rank != victim]
    for seen in survivors:
        assert seen.rank == victim, seen
        assert f"rank {victim} " in seen.message, seen
        assert seen.at - died_at < NOTICED_S, f"after {seen.at - died_at:.2f} s: {seen}"
        assert seen.again_seconds < NOTICED_S and seen.destroy_seconds < NOTICED_S, seen
        assert seen.kind in ("TransportError", "RemoteError"), seen
    return max(seen.at - died_at for seen in survivors)


@fast_in(
    "world, operation",
    [
        *((shm(3), operation) for operation in ("shared",)),
        *((tcp(3), operation) for operation in ("large", "barrier")),
        *((mixed(4), operation) for operation in ("broadcast",)),
    ],
    list(itertools.product(WORLDS, OPERATIONS)),
)
def test_kill_in_mid_collective(world, operation, tmp_path, record_property):
    path = str(tmp_path / "died")
    results = spawn_in(world, die_in, operation, path, expect_exit={VICTIM: signal.SIGKILL})
    record_property("seconds", check_survivors(results, noted_time(path)))


def die_between(rank, world_size, path):
    """Dies while the others compute; they find out at their next call."""
    with process_group():
        x = torch.ones(10)
        bagua.all_reduce(x)
        meet()
        if rank == VICTIM:
            note_time(path)
            kill()
        wait_for_end(path)
        num_calls = 0

        def call():
            nonlocal num_calls
            num_calls += 1
            bagua.all_reduce(x)

        seen = watch(call)
        assert num_calls == 2, "the one that fails, and the one after"
        return seen


@in_worlds([tcp(3)], slow=[shm(3)])
def test_a_death_between_calls_is_known_at_the_next_one(world, tmp_path):
    path = str(tmp_path / "died")
    check_survivors(spawn_in(world, die_between, path, expect_exit={VICTIM: signal.SIGKILL}), noted_time(path))


def die_before_first_contact(rank, world_size, path, victim):
    """Dies after the rendezvous and before any connection."""
    with process_group():
        meet()
        if rank == victim:
            note_time(path)
            kill()
        return watch(bagua.barrier)


@fast_in("world, victim", [(tcp(3), 2)], list(itertools.product([shm(3), tcp(3)], [0, 2])))
def test_a_death_before_the_first_contact(world, victim, tmp_path):
    """The ranks that dial are refused; so are the status queries of those that wait to be dialled."""
    path = str(tmp_path / "died")
    results = spawn_in(world, die_before_first_contact, path, victim, expect_exit={victim: signal.SIGKILL})
    for rank, seen in enumerate(results):
        if rank != victim:
            assert seen.rank == victim, seen
            assert seen.at - noted_time(path) < NOTICED_S, seen


def die_with_messages_under_way(rank, world_size, path):
    with process_group():
        group = bagua.get_default_group()
        bagua.barrier()
        meet()
        x = torch.ones(1000)
        if rank == VICTIM:
            bagua.recv(x, 0)
            meet()
            note_time(path)
            kill()
        if rank == 0:
            bagua.send(x, VICTIM)
        works = [group.recv(torch.empty(5), VICTIM) for _ in range(3)]
        meet()
        begin = time.monotonic()
        messages = []
        for work in works:
            with pytest.raises(bagua.BaguaError) as caught:
                work.wait()
            assert caught.value.rank == VICTIM
            messages.append(str(work.exception()))
        assert len(set(messages)) == 1
        return time.monotonic() - begin


@in_worlds([shm(3)], slow=[tcp(3)])
def test_pending_receives_from_a_dead_rank(world, tmp_path):
    path = str(tmp_path / "died")
    results = spawn_in(world, die_with_messages_under_way, path, expect_exit={VICTIM: signal.SIGKILL})
    assert results[0] < NOTICED_S and results[2] < NOTICED_S


def two_die(rank, world_size, path):
    with process_group():
        call = OPERATIONS["large"]()
        call()
        meet()
        if rank in (1, 2):
            die_in_the_middle(call, f"{path}{rank}")
        return watch(call)


def test_two_deaths_at_once(tmp_path):
    path = str(tmp_path / "died")
    dead = {1: signal.SIGKILL, 2: signal.SIGKILL}
    results = spawn_in(shm(4), two_die, path, expect_exit=dead)
    first_at = min(noted_time(f"{path}{rank}") for rank in dead)
    for seen in (results[0], results[3]):
        assert seen.rank in dead and seen.at - first_at < NOTICED_S, seen


def two_of_a_ring_die(rank, world_size, path):
    """Each rank has to do with its neighbors only; what 0 hears of rank 1, and 4 of rank 3, is all that they see."""
    with process_group():
        x, into = torch.ones(3), torch.ones(3)
        for distance in (1, -1):
            sent = bagua.send(x, (rank + distance) % world_size, async_op=True)
            bagua.recv(into, (rank - distance) % world_size)
            sent.wait()
        meet()
        if rank in (1, 3):
            note_time(f"{path}{rank}")
            kill()
        try:
            bagua.recv(into, (rank + 1) % world_size)
        except bagua.BaguaError as error:
            return error.rank, error.ranks, str(error), time.monotonic()
        raise AssertionError("received from a rank that sends nothing")


@pytest.mark.slow("nothing: FewLinks.RanksOfARingNameTheSameDead of csrc/tests is the fast one")
@in_worlds([shm(5), tcp(5)])
def test_survivors_of_a_ring_name_the_same_dead(world, tmp_path):
    path = str(tmp_path / "died")
    dead = {1: signal.SIGKILL, 3: signal.SIGKILL}
    results = spawn_in(world, two_of_a_ring_die, path, expect_exit=dead)
    first_at = min(noted_time(f"{path}{rank}") for rank in dead)
    for survivor in (0, 2, 4):
        named, ranks, message, at = results[survivor]
        assert (named, ranks) == (1, (1, 3)), (survivor, named, ranks, message)
        assert at - first_at < NOTICED_S, (survivor, message)


# ---- nothing is left over


def unix_names():
    with open("/proc/net/unix") as table:
        return {line.split()[-1] for line in table if "@bagua-" in line}


def is_alive(pid):
    try:
        return process_state(pid) not in "ZX"
    except OSError:
        return False


def all_die(rank, world_size):
    bagua.init_process_group(timeout=LONG_S)
    call = OPERATIONS["shared"]()
    for _ in range(20):
        call()
    meet()
    threading.Timer(0.1, kill).start()
    with contextlib.suppress(bagua.BaguaError):  # of a rank that was killed before this one
        while True:
            call()
    threading.Event().wait()


def test_nothing_is_left_after_kill_9():
    shared_files = set(os.listdir("/dev/shm"))
    with Pool(3) as pool:
        run = pool.start(all_die, expect_exit=dict.fromkeys(range(3), signal.SIGKILL))
        pids = run.pids
        run.result()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not [name for name in unix_names() if any(name.startswith(f"@bagua-{pid}-") for pid in pids)]
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_files if "bagua" in name}

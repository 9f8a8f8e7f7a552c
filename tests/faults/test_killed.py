"""kill -9 in the middle of a collective: every other rank raises long before its deadline and names the dead rank."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import bagua
from bagua.testing import Pool, kill
from tests.communication.worlds import in_worlds, shm, tcp
from tests.faults.scenarios import (
    OPERATIONS,
    WORLDS,
    die_in_the_middle,
    note_time,
    noted_time,
    process_group,
    spawn_in,
    watch,
)

TIMEOUT_S = 8.0
NOTICED_S = 4.0  # far less than the timeout: it is the death that was noticed, on however loaded a machine
QUICK_S = 1.0
VICTIM = 1


def die_in(rank, world_size, operation, path):
    with process_group(TIMEOUT_S):
        call = OPERATIONS[operation]()
        call()
        bagua.barrier()
        if rank == VICTIM:
            die_in_the_middle(call, path)
        return watch(call)


def check_survivors(results, died_at, victim=VICTIM):
    survivors = [seen for rank, seen in enumerate(results) if rank != victim]
    for seen in survivors:
        assert seen.rank == victim, seen
        assert f"rank {victim} " in seen.message, seen
        assert seen.at - died_at < NOTICED_S, f"after {seen.at - died_at:.2f} s: {seen}"
        assert seen.again_seconds < QUICK_S and seen.destroy_seconds < QUICK_S, seen
        assert seen.kind in ("TransportError", "RemoteError"), seen
    return max(seen.at - died_at for seen in survivors)


@pytest.mark.parametrize("operation", OPERATIONS)
@in_worlds(WORLDS)
def test_kill_in_mid_collective(world, operation, tmp_path, record_property):
    path = str(tmp_path / "died")
    results = spawn_in(world, die_in, operation, path, expect_exit={VICTIM: signal.SIGKILL})
    record_property("seconds", check_survivors(results, noted_time(path)))


def die_between(rank, world_size, path):
    """Dies while the others compute; they find out at their next call."""
    with process_group(TIMEOUT_S):
        x = torch.ones(10)
        bagua.all_reduce(x)
        if rank == VICTIM:
            note_time(path)
            kill()
        time.sleep(0.5)
        begin = time.monotonic()
        seen = watch(lambda: bagua.all_reduce(x))
        return seen, seen.at - begin


@in_worlds([shm(3), tcp(3)])
def test_a_death_between_calls_is_known_at_the_next_one(world, tmp_path):
    results = spawn_in(world, die_between, str(tmp_path / "died"), expect_exit={VICTIM: signal.SIGKILL})
    for seen, seconds in (result for result in results if result is not None):
        assert seen.rank == VICTIM and seconds < 0.5


def die_before_first_contact(rank, world_size, path, victim):
    """Dies after the rendezvous and before any connection."""
    with process_group(TIMEOUT_S):
        if rank == victim:
            note_time(path)
            kill()
        return watch(bagua.barrier)


@pytest.mark.parametrize(("world", "victim"), [(shm(3), 0), (shm(3), 2), (tcp(3), 0), (tcp(3), 2)], ids=str)
def test_a_death_before_the_first_contact(world, victim, tmp_path):
    """The ranks that dial are refused; so are the questions of those that wait to be dialled."""
    path = str(tmp_path / "died")
    results = spawn_in(world, die_before_first_contact, path, victim, expect_exit={victim: signal.SIGKILL})
    for rank, seen in enumerate(results):
        if rank != victim:
            assert seen.rank == victim, seen
            assert seen.at - noted_time(path) < NOTICED_S, seen


def die_with_messages_under_way(rank, world_size, path):
    with process_group(TIMEOUT_S):
        group = bagua.get_default_group()
        bagua.barrier()
        x = torch.ones(1000)
        if rank == VICTIM:
            bagua.recv(x, 0)
            note_time(path)
            kill()
        if rank == 0:
            bagua.send(x, VICTIM)
        works = [group.recv(torch.empty(5), VICTIM) for _ in range(3)]
        begin = time.monotonic()
        messages = []
        for work in works:
            with pytest.raises(bagua.BaguaError) as caught:
                work.wait()
            assert caught.value.rank == VICTIM
            messages.append(str(work.exception()))
        assert len(set(messages)) == 1
        return time.monotonic() - begin


@in_worlds([shm(3), tcp(3)])
def test_pending_receives_from_a_dead_rank(world, tmp_path):
    path = str(tmp_path / "died")
    results = spawn_in(world, die_with_messages_under_way, path, expect_exit={VICTIM: signal.SIGKILL})
    assert results[0] < NOTICED_S and results[2] < NOTICED_S


def two_die(rank, world_size, path):
    with process_group(TIMEOUT_S):
        call = OPERATIONS["large"]()
        call()
        if rank in (1, 2):
            if rank == 2:
                note_time(path)
            threading.Timer(0.05, kill).start()
            while True:
                call()
        return watch(call)


def test_two_deaths_at_once(tmp_path):
    path = str(tmp_path / "died")
    dead = {1: signal.SIGKILL, 2: signal.SIGKILL}
    for seen in spawn_in(shm(4), two_die, path, expect_exit=dead):
        assert seen is None or (seen.rank in dead and seen.at - noted_time(path) < NOTICED_S)


# ---- nothing is left over


def unix_names():
    with open("/proc/net/unix") as table:
        return {line.split()[-1] for line in table if "@bagua-" in line}


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_die(rank, world_size):
    bagua.init_process_group(timeout=TIMEOUT_S)
    call = OPERATIONS["shared"]()
    for _ in range(20):
        call()
    threading.Timer(0.1, kill).start()
    with contextlib.suppress(bagua.BaguaError):  # of a rank that was killed before this one
        while True:
            call()
    time.sleep(10)


def test_nothing_is_left_after_kill_9():
    shared_files = set(os.listdir("/dev/shm"))
    with Pool(3) as pool:
        run = pool.start(all_die, expect_exit=dict.fromkeys(range(3), signal.SIGKILL))
        pids = run.pids
        run.result()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not [name for name in unix_names() if any(name.startswith(f"@bagua-{pid}-") for pid in pids)]
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_files if "bagua" in name}

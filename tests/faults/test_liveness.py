"""A peer that falls silent is named within the heartbeat timeout, however long an operation may take; one whose program
is busy is not."""

import ctypes
import dataclasses
import signal
import threading
import time

import pytest
import torch

import bagua
from bagua.replay import hosts
from bagua.testing import Pool, cont, stop
from tests.distributed.worlds import fast_in, in_worlds, shm, tcp
from tests.faults.scenarios import (
    LONG_S,
    note_time,
    noted_time,
    process_group,
    spawn_in,
    wait_for_end,
    wait_for_note,
    watch,
)
from tests.faults.test_blame import CONNECTION, can_make_hosts, meet, needs_hosts, on_hosts  # noqa: F401

pytestmark = pytest.mark.timed

HEARTBEAT_TIMEOUT_S = 1.0
SLACK_S = 1.0  # of a loaded machine
ENV = {"BAGUA_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S)}


def with_heartbeats(world):
    return dataclasses.replace(world, env={**world.env, **ENV})


def wait_for_a_stopped_rank(rank, world_size, path):
    """Rank 0 waits for rank 2, which is stopped; rank 1 waits for nobody, and asks whether the group has failed."""
    with process_group(LONG_S) as group:
        meet()
        if rank == 2:
            note_time(path)
            stop()
        if rank == 0:
            return watch(lambda: bagua.recv(torch.ones(3), 2))

        def ask():
            while True:
                group.check()
                time.sleep(0.01)

        return watch(ask)


@in_worlds([shm(3)], slow=[tcp(3)])
def test_a_stopped_rank_is_named_long_before_the_deadline(world, tmp_path):
    path = str(tmp_path / "since")
    results = spawn_in(with_heartbeats(world), wait_for_a_stopped_rank, path, expect_exit={2: signal.SIGSTOP})
    for seen in results[:2]:
        assert seen.rank == 2 and "rank 2 does not answer: its process is stopped" in seen.message, seen
        # Not before the timeout either, but for a heartbeat that had been due.
        assert 0.85 * HEARTBEAT_TIMEOUT_S < seen.at - noted_time(path) < HEARTBEAT_TIMEOUT_S + SLACK_S, seen


def stop_for_a_while(rank, world_size, path):
    """Rank 2 is stopped until rank 0 has seen it."""
    with process_group(LONG_S):
        meet()
        if rank == 2:
            note_time(path)
            stop()
        seen = watch(lambda: bagua.recv(torch.ones(3), 0 if rank == 2 else 2))
        if rank == 0:
            cont(wait_for_note(path))
        return seen


@pytest.mark.slow("test_a_stopped_rank_is_named_long_before_the_deadline")
@in_worlds([shm(3), tcp(3)])
def test_a_rank_that_goes_on_after_a_stop_blames_none_of_the_others(world, tmp_path):
    for seen in spawn_in(with_heartbeats(world), stop_for_a_while, str(tmp_path / "since")):
        assert seen.rank == 2 and "rank 2 does not answer: its process is stopped" in seen.message, seen


def hold_the_interpreter(rank, world_size):
    """Rank 1 computes for longer than the timeout, without letting any other thread of Python run."""
    with process_group(LONG_S):
        meet()
        if rank == 1:
            ctypes.PyDLL(None).usleep(int(2.0 * HEARTBEAT_TIMEOUT_S * 1e6))
        x = torch.ones(3)
        begin = time.monotonic()
        bagua.all_reduce(x)
        return x.tolist(), time.monotonic() - begin


@in_worlds([tcp(2)], slow=[shm(2)])
def test_a_busy_interpreter_is_no_death(world):
    (values, waited_s), _ = spawn_in(with_heartbeats(world), hold_the_interpreter)
    assert values == [2.0] * 3 and waited_s > 1.5 * HEARTBEAT_TIMEOUT_S


def run_on_hosts(size, path, program, **options):
    """Returns what program(rank, size, names of the hosts, path) returns on a host for each rank, by rank."""
    with hosts.hosts(size, None) as prefixes, Pool(size, nodes=size) as pool:
        names = [prefix[-1] for prefix in prefixes]
        env = {"BAGUA_SOCKET_IFNAME": "eth0", **ENV}
        return pool.run(on_hosts, args=(names, path, program), env=env, **options)


def wait_until_a_cut(rank, world_size, names, path):
    meet()
    bagua.barrier()
    if rank == world_size - 1:
        hosts.cut(names, rank)
        note_time(path)
    x = torch.ones(world_size)
    return watch(lambda: bagua.all_to_all(x.clone(), x))


@needs_hosts
@fast_in("size", [3], [2])
def test_a_cut_cable_is_noticed_long_before_the_deadline(size, tmp_path):
    path = str(tmp_path / "since")
    results = run_on_hosts(size, path, wait_until_a_cut)
    for rank, seen in enumerate(results):
        assert seen.at - noted_time(path) < HEARTBEAT_TIMEOUT_S + SLACK_S, (rank, seen)
        if size == 2:
            assert seen.rank is None and CONNECTION.search(seen.message), (rank, seen)
        else:
            assert seen.rank == 2, (rank, seen)
            assert ("its own host is cut off" in seen.message) == (rank == 2), (rank, seen)


def wait_for_a_host_that_was_cut_off(rank, world_size, names, path):
    """Nobody has been connected to anybody. The others wait for rank 0, or for nobody as yet, and rank 0 for rank 1."""
    if rank == 0:
        hosts.cut(names, 0)
        note_time(path)
    wait_for_note(path)
    if rank > 1:
        time.sleep(2 * HEARTBEAT_TIMEOUT_S)
    return watch(lambda: bagua.recv(torch.ones(3), (rank + 1) % 2))


@needs_hosts
@pytest.mark.slow("test_a_host_that_took_a_connection_is_called_again_where_it_is_asked_about")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_host_that_was_cut_off_before_anybody_was_connected_is_named(size, tmp_path):
    path = str(tmp_path / "since")
    results = run_on_hosts(size, path, wait_for_a_host_that_was_cut_off)
    for rank, seen in enumerate(results):
        late_s = 2 * HEARTBEAT_TIMEOUT_S if rank > 1 else 0
        assert seen.at - noted_time(path) < HEARTBEAT_TIMEOUT_S + late_s + SLACK_S, (rank, seen)
        if size == 2:
            assert seen.rank is None and CONNECTION.search(seen.message), (rank, seen)
        else:
            assert seen.rank == 0, (rank, seen)
            assert ("its own host is cut off" in seen.message) == (rank == 0), (rank, seen)


def wait_for_a_host_that_dies(rank, world_size, names, path):
    """Rank 0 is stopped, so that its host takes the connection of rank 1 and nobody answers; then its cable is cut."""
    if rank == 0:
        note_time(path)
        stop()
    wait_for_end(path)

    def cut_it():
        hosts.cut(names, 0)
        note_time(path)

    threading.Timer(0.5, cut_it).start()
    return watch(lambda: bagua.recv(torch.ones(3), 0))


@needs_hosts
@pytest.mark.slow("test_a_host_that_dies_in_the_handshake_is_named")
def test_a_host_that_dies_before_it_has_answered_is_noticed_long_before_the_deadline(tmp_path):
    path = str(tmp_path / "since")
    seen = run_on_hosts(2, path, wait_for_a_host_that_dies, expect_exit={0: signal.SIGSTOP})[1]
    assert seen.rank is None and CONNECTION.search(seen.message), seen
    assert 0 < seen.at - noted_time(path) < 2 * HEARTBEAT_TIMEOUT_S + SLACK_S, seen  # keepalives come every second

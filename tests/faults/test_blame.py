"""A silent rank, stopped or behind a cut cable, among ranks that wait for one another: everybody names it, or the
connection to it, and never one that waits too, in whatever operation, group or kind of traffic it does."""

import itertools
import random
import re
import signal
import threading
import time
from typing import NamedTuple

import pytest
import torch

import bagua
from bagua.replay import hosts
from bagua.testing import Pool, stop
from tests.conformance.training import ALGORITHMS, make_optimizer
from tests.distributed.worlds import SAME_TEST, WorldKind, fast_in, in_worlds, mixed, shm, tcp
from tests.faults.scenarios import note_time, noted_time, process_group, spawn_in, watch

pytestmark = pytest.mark.timed

SHORT_S = 0.5
LONG_S = 6.0
SLACK_S = 1.0
SILENT = 3


def bound(timeout_s):
    """What finding out may take at most, on top of the timeout: the graces of Mesh::blame, and for a loaded machine."""
    return 1.6 * timeout_s + 0.6 + SLACK_S


# ---- chains that lead through other operations, messages and groups. Only rank `first` has a short deadline, so it is
# the first to find out, and nobody has told it anything.


def messages(rank):
    """0 waits for 1, which waits for 2, which waits for the silent one."""
    return lambda: bagua.recv(torch.ones(3), rank + 1)


def operations(rank):
    """With rank 2, which finishes step 0 with rank 0, one step ahead of rank 1, which it waits for in step 1."""
    step = iter(range(10))
    return lambda: bagua.neighbor_average(torch.ones(100), "shift_one", next(step))


def kinds_of_traffic(rank):
    """0 and 1 wait for 2 in a collective; 2 waits for a message."""
    return lambda: bagua.recv(torch.ones(3), SILENT) if rank == 2 else bagua.broadcast(torch.ones(3), 2)


CHAINS = {"messages": (messages, 0), "operations": (operations, 2), "kinds of traffic": (kinds_of_traffic, 0)}


def meet():
    """Everybody is connected to everybody, for both kinds of traffic."""
    rank, size = bagua.get_rank(), bagua.get_world_size()
    bagua.all_to_all(torch.ones(size), torch.ones(size))
    x = torch.ones(1)
    peers = [peer for peer in range(size) if peer != rank]
    works = [call(x.clone(), peer, async_op=True) for peer in peers for call in (bagua.send, bagua.recv)]
    for work in works:
        work.wait()
    bagua.barrier()


def wait_in_a_chain(rank, world_size, chain, how, is_connected, path):
    with process_group(20.0):
        if is_connected:
            meet()
        call, first = CHAINS[chain]
        call = call(rank)
        if rank == SILENT:
            note_time(path)
            if how == "stopped":
                stop()
            time.sleep(LONG_S)
            return None
        bagua.get_default_group().set_timeout(SHORT_S if rank == first else LONG_S)
        time.sleep(0.2)
        return watch(call)


def check_chain(world, chain, how, is_connected, tmp_path):
    path = str(tmp_path / "since")
    expect_exit = {SILENT: signal.SIGSTOP} if how == "stopped" else None
    results = spawn_in(world, wait_in_a_chain, chain, how, is_connected, path, expect_exit=expect_exit)
    says = "does not answer: its process is stopped" if how == "stopped" else "has not called it"
    for rank, seen in enumerate(results[:SILENT]):
        assert seen.rank == SILENT and f"rank {SILENT} {says}" in seen.message, (rank, seen)
        assert seen.at - noted_time(path) < bound(SHORT_S), (rank, seen)


@fast_in(
    "world, chain",
    [(tcp(4), "kinds of traffic")],
    list(itertools.product([shm(4), tcp(4), mixed(4)], CHAINS)),
)
def test_the_end_of_a_chain_is_named(world, chain, tmp_path):
    check_chain(world, chain, "stopped", True, tmp_path)


@pytest.mark.parametrize("chain", CHAINS)
@in_worlds([], slow=[shm(4), tcp(4)])
def test_a_rank_that_is_there_and_never_calls(world, chain, tmp_path):
    check_chain(world, chain, "late", True, tmp_path)


def fails_elsewhere(rank, world_size, path):
    """Rank 2 fails with rank 3 in a group of the two, and leaves; 0 and 1 wait for rank 2."""
    with process_group(LONG_S):
        meet()
        pair = bagua.new_group([2, 3], timeout=SHORT_S)
        if rank == SILENT:
            note_time(path)
            stop()
        if rank < 2:
            return watch(lambda: bagua.broadcast(torch.ones(3), 2))
        with pytest.raises(bagua.DeadlineExceeded) as caught:
            bagua.barrier(group=pair)
        return caught.value.rank


def test_a_rank_that_leaves_for_another_group_s_failure(tmp_path):
    path = str(tmp_path / "since")
    results = spawn_in(shm(4), fails_elsewhere, path, expect_exit={SILENT: signal.SIGSTOP})
    assert results[2] == SILENT
    for seen in results[:2]:
        assert seen.rank == SILENT, seen
        assert "rank 2 left the group 'world'" in seen.message and "before, in group 'group1:2,3'" in seen.message, seen
        assert seen.at - noted_time(path) < bound(SHORT_S), seen


def wait_through_groups(rank, world_size):
    """Each rank waits for the next one in a group of the two."""
    with process_group(20.0):
        pairs = [bagua.new_group([low, low + 1], timeout=SHORT_S if low == 0 else LONG_S) for low in range(3)]
        for low, pair in enumerate(pairs):
            if rank in (low, low + 1):
                bagua.barrier(group=pair)
        bagua.barrier()
        if rank == SILENT:
            stop()
        return watch(lambda: bagua.barrier(group=pairs[rank]))


@in_worlds([], slow=[shm(4), tcp(4)])
def test_a_chain_through_groups(world):
    """Whom the group does not know is named as a rank of the job."""
    seen = spawn_in(world, wait_through_groups, expect_exit={SILENT: signal.SIGSTOP})
    assert seen[0].rank is None, seen[0]
    assert "rank 3 of the job does not answer: its process is stopped" in seen[0].message, seen[0]
    assert "rank 1 has not called it: it waits in another group" in seen[0].message, seen[0]
    assert seen[2].rank == SILENT, seen[2]


def wait_in_a_circle(rank, world_size):
    with process_group(LONG_S):
        meet()
        bagua.get_default_group().set_timeout(SHORT_S)
        with pytest.raises(bagua.BaguaError) as caught:
            bagua.recv(torch.ones(1), (rank + 1) % world_size)
        return caught.value.rank, str(caught.value)


@in_worlds([shm(3)], slow=[tcp(2)])
def test_nobody_is_named_in_a_circle(world):
    for named, message in spawn_in(world, wait_in_a_circle):
        assert named is None and f"did not end within {SHORT_S:g} s" in message, message


# ---- cut cables: every rank is a host of its own

CONNECTION = re.compile(r"the connection between rank (\d) and rank (\d) is silent")
needs_hosts = pytest.mark.usefixtures("can_make_hosts")


@pytest.fixture(scope="module")
def can_make_hosts():
    """Asked by tests only: it makes one, and every rank imports this file."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)


def on_hosts(rank, world_size, names, path, fn, *args):
    """In ranks of a Pool; they meet in a file, since the test's store is on the test's host."""
    hosts.move_to(names[rank])
    store = torch.distributed.FileStore(path + "-store", world_size)
    bagua.init_process_group(store=store, rank=rank, world_size=world_size, timeout=20.0)
    try:
        return fn(rank, world_size, names, path, *args)
    finally:
        bagua.destroy_process_group()


def spawn_on_hosts(size, path, fn, *args, timeout=60.0):
    with hosts.hosts(size, None) as prefixes, Pool(size, nodes=size) as pool:
        names = [prefix[-1] for prefix in prefixes]
        env = {"BAGUA_SOCKET_IFNAME": "eth0"}
        return pool.run(on_hosts, args=(names, path, fn, *args), env=env, timeout=timeout)


def sum_until_a_cut(rank, world_size, names, path, pair):
    meet()
    bagua.get_default_group().set_timeout(SHORT_S)
    bagua.barrier()
    if pair is None and rank == SILENT:
        hosts.cut(names, rank)
        note_time(path)
    elif pair is not None and rank in pair:
        hosts.cut(names, rank, sum(pair) - rank)
        if rank == pair[0]:
            note_time(path)
    x = torch.ones(world_size)
    return watch(lambda: bagua.all_to_all(x.clone(), x))


@needs_hosts
def test_a_cut_off_host_is_named_by_the_others_and_by_itself(tmp_path):
    path = str(tmp_path / "since")
    for rank, seen in enumerate(spawn_on_hosts(4, path, sum_until_a_cut, None)):
        assert seen.rank == SILENT, (rank, seen)
        assert seen.at - noted_time(path) < bound(SHORT_S), (rank, seen)
        assert ("its own host is cut off" in seen.message) == (rank == SILENT), (rank, seen)


@needs_hosts
@pytest.mark.parametrize(
    ("size", "pair"),
    [pytest.param(2, (0, 1), id="of two", marks=SAME_TEST), pytest.param(4, (1, 2), id="of four")],
)
def test_a_cut_connection_is_named(size, pair, tmp_path):
    path = str(tmp_path / "since")
    for rank, seen in enumerate(spawn_on_hosts(size, path, sum_until_a_cut, pair)):
        named = CONNECTION.search(seen.message)
        assert named and sorted(map(int, named.groups())) == list(pair), (rank, seen)
        assert seen.rank is None, (rank, seen)
        assert seen.at - noted_time(path) < bound(SHORT_S), (rank, seen)


# ---- training

TIMEOUT_S = 2.0
OPTIONS = {"async_averaging": {"sync_interval": 0.0}, "local_sgd": {"sync_every": 3}}


class Found(NamedTuple):
    rank: int | None
    message: str
    at: float  # on the monotonic clock


def train(rank, world_size, algorithm, at_s, silence):
    """Until a failure, with a rank that falls silent at some time."""
    bagua.get_default_group().set_timeout(TIMEOUT_S)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    optimizer = make_optimizer(algorithm, model)
    bagua.with_bagua(model, [optimizer], algorithm=algorithm, bucket_bytes=20_000, **OPTIONS.get(algorithm, {}))
    x = torch.randn(8, 64)
    if rank == SILENT:
        threading.Timer(at_s, silence).start()

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    end = time.monotonic() + 40
    while time.monotonic() < end:
        try:
            step()
        except bagua.BaguaError as error:
            return Found(error.rank, str(error), time.monotonic())
    raise AssertionError("no failure was seen")


def train_and_stop(rank, world_size, algorithm, at_s, path):
    def silence():
        note_time(path)
        stop()

    with process_group(20.0):
        return train(rank, world_size, algorithm, at_s, silence)


def train_and_cut(rank, world_size, names, path, algorithm, at_s):
    def silence():
        note_time(path)
        hosts.cut(names, rank)

    return train(rank, world_size, algorithm, at_s, silence)


def names_the_silent_one(seen):
    connection = CONNECTION.search(seen.message)
    if seen.rank is None:
        return connection is not None and str(SILENT) in connection.groups()
    return seen.rank == SILENT and (f"rank {SILENT}" in seen.message or "its own host is cut off" in seen.message)


NUM_JOBS = {"shm": 3, "tcp": 3, "mixed": 3, "hosts": 4}  # with 8 algorithms 104


@pytest.mark.slow("test_the_end_of_a_chain_is_named")
@pytest.mark.parametrize("fault", NUM_JOBS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_names_no_innocent(algorithm, fault, tmp_path, record_property, request):
    if fault == "hosts":
        request.getfixturevalue("can_make_hosts")
    worlds: dict[str, WorldKind] = {"shm": shm(4), "tcp": tcp(4), "mixed": mixed(4)}
    longest = 0.0
    for job in range(NUM_JOBS[fault]):
        seed = random.SystemRandom().randrange(2**32)
        at_s = random.Random(seed).uniform(0.02, 0.6)
        path = str(tmp_path / f"since{job}")
        if fault == "hosts":
            results = spawn_on_hosts(4, path, train_and_cut, algorithm, at_s)
        else:
            expect_exit = {SILENT: signal.SIGSTOP}
            results = spawn_in(worlds[fault], train_and_stop, algorithm, at_s, path, expect_exit=expect_exit)
        for rank, seen in enumerate(results):
            if seen is None:
                continue
            assert names_the_silent_one(seen), f"seed {seed}, rank {rank}: {seen}"
            if rank != SILENT:
                longest = max(longest, seen.at - noted_time(path) - TIMEOUT_S)
    record_property("seconds", longest)
    print(f"{algorithm:28} {fault:6} {NUM_JOBS[fault]} jobs, at most {longest:.1f} s after the timeout")

"""Ranks that call different things: both sides are shown on every rank, long before the deadline."""

import itertools
import time

import pytest
import torch

import bagua
from bagua import ReduceOp
from tests.distributed.worlds import Pools, fast_in, in_worlds, mixed, shm, tcp
from tests.faults.scenarios import WORLDS

pytestmark = pytest.mark.timed

TIMEOUT_S = 20.0
QUICKLY_S = TIMEOUT_S / 2  # it is the mismatch that was noticed, no deadline that has passed
ODD_ONE = 1


@pytest.fixture(scope="module")
def pools():
    pools = Pools()
    yield pools
    pools.close()


def ones(numel, dtype=torch.float32):
    return torch.ones(numel, dtype=dtype)


# What most ranks call, what rank 1 calls, and how the message shows them.
MISMATCHES = {
    "size": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.all_reduce(ones(11)),
        ["all_reduce #2 of 10 float32", "all_reduce #2 of 11 float32"],
    ),
    "large size": (
        lambda g: g.all_reduce(ones(100_000)),
        lambda g: g.all_reduce(ones(100_001)),
        ["of 100000 float32", "of 100001 float32"],
    ),
    "small and large": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.all_reduce(ones(100_000)),
        ["of 10 float32", "of 100000 float32"],
    ),
    "dtype": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.all_reduce(ones(10, torch.int32)),
        ["of 10 float32", "of 10 int32"],
    ),
    "op": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.all_reduce(ones(10), ReduceOp.MAX),
        ["float32 (SUM)", "float32 (MAX)"],
    ),
    "codec": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.all_reduce(ones(10), codec="bf16"),
        ["all_reduce #2 of 10 float32 (SUM)", "with codec bf16"],
    ),
    "options of a codec": (
        lambda g: g.all_reduce(ones(10), codec="topk:k=8"),
        lambda g: g.all_reduce(ones(10), codec="topk:k=16"),
        ["with codec topk:k=8", "with codec topk:k=16"],
    ),
    "collective": (
        lambda g: g.all_reduce(ones(10)),
        lambda g: g.broadcast(ones(10), 0),
        ["all_reduce #2 of 10 float32", "broadcast #2 of 10 float32"],
    ),
    "root": (
        lambda g: g.reduce(ones(10), 0),
        lambda g: g.reduce(ones(10), 2),
        # If rank 1 sends to a rank that does not listen, its next call is what does not fit.
        [" called reduce #", " while this rank called reduce #2 of 10 float32 (SUM) at rank 0"],
    ),
    "barrier": (
        lambda g: g.barrier(),
        lambda g: g.all_gather(ones(g.size * 5), ones(5)),
        ["barrier #2", "all_gather #2 of 5 float32"],
    ),
}


def connected_group():
    """A new group in which everybody is connected to everybody, by operation #1."""
    group = bagua.new_group(timeout=TIMEOUT_S)
    group.all_to_all(ones(group.size), ones(group.size)).wait()
    bagua.barrier()  # of the default group: nobody is in the operation above any more
    return group


def differ(rank, world_size, names):
    seen = {}
    for name in names:
        group = connected_group()
        usual, odd, _ = MISMATCHES[name]
        begin = time.monotonic()
        messages = []
        call = odd if rank == ODD_ONE else usual
        # Whoever had only to send may be done before the others have looked; it is told at a later call.
        while len(messages) < 2 and time.monotonic() < begin + TIMEOUT_S:
            try:
                call(group).wait()
            except bagua.BaguaError as error:
                messages.append((type(error).__name__, error.rank, str(error)))
            call = usual
        seen[name] = (messages, time.monotonic() - begin)
        bagua.barrier()  # the default group is not concerned
    return seen


@in_worlds([shm(3)], slow=WORLDS)
def test_both_sides_are_shown_on_every_rank(pools, world):
    results = pools.run(world, differ, list(MISMATCHES), timeout=100)
    for name, (_, _, shown) in MISMATCHES.items():
        for rank, seen in enumerate(results):
            messages, seconds = seen[name]
            assert messages, f"{name}: rank {rank} saw nothing"
            assert seconds < QUICKLY_S, f"{name}: rank {rank} took {seconds:.1f} s"
            assert len({text for _, _, text in messages}) == 1, f"{name}: rank {rank}: {messages}"
            kind, blamed, text = messages[0]
            assert kind in ("InvalidArgument", "RemoteError"), f"{name}: rank {rank}: {text}"
            assert all(part in text for part in shown), f"{name}: rank {rank}: {text}"
            assert "all ranks of a group must make the same calls in the same order" in text
            assert blamed is not None


def swap(rank, world_size):
    """Two operations in opposite order, both queued before anybody waits."""
    group = connected_group()
    calls = [lambda: group.all_reduce(ones(10)), lambda: group.broadcast(ones(20), 0)]
    if rank == ODD_ONE:
        calls.reverse()
    with pytest.raises(bagua.BaguaError) as caught:
        works = [call() for call in calls]  # the second call may know already what the first one met
        for work in works:
            work.wait()
        group.barrier().wait()
    return str(caught.value)


@in_worlds([mixed(4)], slow=WORLDS)
def test_order(pools, world):
    for text in pools.run(world, swap):
        assert "all_reduce #2 of 10 float32" in text and "broadcast #2 of 20 float32" in text


def wait_in_a_circle(rank, world_size, is_connected):
    """Every rank waits for the next one to begin, and no message ever travels."""
    group = connected_group() if is_connected else bagua.new_group(timeout=TIMEOUT_S)
    bagua.barrier()
    begin = time.monotonic()
    with pytest.raises(bagua.BaguaError) as caught:
        group.broadcast(ones(10), (rank + 1) % world_size).wait()
    seconds = time.monotonic() - begin
    bagua.barrier()  # of the default group: who leaves early is asked in vain
    return str(caught.value), seconds


@fast_in(
    "world, before",
    [(shm(3), "connected"), (tcp(3), "first contact")],
    list(itertools.product(WORLDS, ["connected", "first contact"])),
)
def test_ranks_that_all_wait(pools, world, before):
    for text, seconds in pools.run(world, wait_in_a_circle, before == "connected"):
        assert text.count("of 10 float32 at rank") == 2, text
        assert seconds < QUICKLY_S, f"{seconds:.1f} s"


def finish_without_a_word(rank, world_size):
    """Each rank sends to the other and receives nothing, so both end well; the next call shows it."""
    group = connected_group()
    other = 1 - rank
    group.gather(None, ones(10), other).wait()
    with pytest.raises(bagua.BaguaError) as caught:
        group.barrier().wait()
        group.barrier().wait()
    return str(caught.value)


def test_ranks_that_only_send(pools):
    for text in pools.run(tcp(2), finish_without_a_word) + pools.run(shm(2), finish_without_a_word):
        assert "gather #2 of 10 float32 at rank" in text and "barrier #3" in text

"""new_group: subsets, overlaps, order, membership, and mistakes that all ranks see."""

import itertools
import os
import time

import pytest
import torch

import bagua
from tests.distributed.worlds import FEW_WORLDS, in_worlds, mixed, shm, tcp
from tests.meeting import meet, wait_until


def total(x, group):
    x = torch.tensor([float(x)])
    bagua.all_reduce(x, group=group)
    return x.item()


def check_subsets(rank, world_size):
    """Every subset of the ranks is a group at the same time."""
    subsets = [s for size in range(1, world_size + 1) for s in itertools.combinations(range(world_size), size)]
    groups = {subset: bagua.new_group(reversed(subset)) for subset in subsets}
    for repetition in range(3):
        for subset, group in groups.items():
            assert group.ranks == sorted(subset)
            assert bagua.get_world_size(group) == len(subset)
            if rank not in subset:
                assert bagua.get_rank(group) == -1
                continue
            assert bagua.get_rank(group) == subset.index(rank)
            assert total(10**rank + repetition, group) == sum(10**r + repetition for r in subset)


@in_worlds([mixed(4)], slow=[shm(3), tcp(3)])
def test_subsets(pools, world):
    pools.run(world, check_subsets)


def check_global_ranks(rank, world_size):
    """src and dst are ranks of the world, as in torch.distributed."""
    group = bagua.new_group([2, 1])
    if rank not in (1, 2):
        return
    x = torch.tensor([rank])
    bagua.broadcast(x, 2, group=group)
    assert x == 2
    x = torch.tensor([rank])
    bagua.reduce(x, 1, group=group)
    assert rank == 2 or x == 3
    output = torch.empty(2, dtype=torch.int64) if rank == 2 else None
    bagua.gather(output, torch.tensor([rank]), 2, group=group)
    assert rank == 1 or output.tolist() == [1, 2]
    if rank == 1:
        bagua.send(torch.tensor([7]), 2, group=group)
    else:
        bagua.recv(x, 1, group=group)
        assert x == 7
    for call in (lambda: bagua.broadcast(x, 0, group=group), lambda: bagua.send(x, 0, group=group)):
        with pytest.raises(
            bagua.InvalidArgument, match=r"0 is not a rank of the group 'group1:1,2' \(ranks \[1, 2\]\)"
        ):
            call()
    bagua.barrier(group=group)


@in_worlds([tcp(3)], slow=[shm(3)])
def test_arguments_are_global_ranks(pools, world):
    pools.run(world, check_global_ranks)


def check_non_member(rank, world_size):
    group = bagua.new_group([0])
    x = torch.ones(2)
    if rank == 0:
        bagua.all_reduce(x, group=group)
        return
    calls = [
        lambda: bagua.all_reduce(x, group=group),
        lambda: bagua.barrier(group=group),
        lambda: bagua.broadcast(x, 0, group=group),
        lambda: bagua.send(x, 0, group=group),
        lambda: bagua.empty(4, group=group),
        lambda: group.events(),
        lambda: bagua.broadcast_object("x", 0, group=group),
        lambda: bagua.all_gather_object("x", group=group),
    ]
    for call in calls:
        with pytest.raises(
            bagua.InvalidArgument, match=r"rank 1 is not a member of the group 'group1:0' \(ranks \[0\]\)"
        ):
            call()


def test_only_members_may_call(pools):
    pools.run(shm(2), check_non_member)


def check_bad_ranks(rank, world_size):
    for ranks in ([], [0, 0], [-1], [0, 2]):
        with pytest.raises(bagua.InvalidArgument, match="must be one or more different numbers in 0..1"):
            bagua.new_group(ranks)
    with pytest.raises(bagua.InvalidArgument, match="timeout"):
        bagua.new_group(timeout=0)
    assert total(1, bagua.new_group()) == world_size, "the attempts above count on no rank"


def test_bad_ranks(pools):
    pools.run(shm(2), check_bad_ranks)


def check_forgotten(rank, world_size):
    """A rank that did not make the group: the others wait for their deadline and are told what is missing."""
    if rank == 0:
        meet()  # when the other one has failed
        return None
    begin = time.monotonic()
    group = bagua.new_group(timeout=0.5)
    with pytest.raises(bagua.DeadlineExceeded) as caught:
        bagua.barrier(group=group)
    assert 0.5 <= time.monotonic() - begin < 2.0  # twice what is promised
    assert caught.value.rank == 0
    meet()
    return str(caught.value)


@pytest.mark.timed
@in_worlds([tcp(2)], slow=[shm(2)])
def test_a_rank_that_did_not_call_new_group(pools, world):
    message = pools.run(world, check_forgotten)[1]
    assert "has not made the group 'group1:0,1'; all ranks call new_group, in the same order" in message


def check_timeout_of_group(rank, world_size):
    group = bagua.new_group()
    bagua.barrier(group=group)
    group.set_timeout(0.5)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(bagua.DeadlineExceeded, match="rank 1 has not called it; its last was barrier"):
            bagua.barrier(group=group)
        assert 0.5 <= time.monotonic() - begin < 2.0  # twice what is promised
    bagua.barrier()  # another group is not concerned
    with pytest.raises(bagua.BaguaError, match="rank 1 has not called it"):
        for _ in range(2):  # the first may find rank 0's part of the barrier before the news
            bagua.barrier(group=group)


@pytest.mark.timed
@in_worlds([shm(2)])
def test_a_group_has_a_timeout_and_a_failure_of_its_own(pools, world):
    pools.run(world, check_timeout_of_group)


def check_ranks(rank, world_size):
    return (
        bagua.get_rank(),
        bagua.get_world_size(),
        bagua.get_local_rank(),
        bagua.get_local_world_size(),
        bagua.get_node_rank(),
    )


def test_ranks_of_nodes(pools):
    assert pools.run(shm(3), check_ranks) == [(r, 3, r, 3, 0) for r in range(3)]
    assert pools.run(tcp(2), check_ranks) == [(r, 2, r, 2, 0) for r in range(2)]
    assert pools.run(mixed(4), check_ranks) == [(r, 4, r % 2, 2, r // 2) for r in range(4)]


def check_objects(rank, world_size):
    objects = [{"rank": r, "data": b"x" * (1000 * r), "none": None} for r in range(world_size)]
    assert bagua.all_gather_object(objects[rank]) == objects
    for src in range(world_size):
        assert bagua.broadcast_object(objects[rank] if rank == src else None, src) == objects[src]
    group = bagua.new_group([0, world_size - 1])
    if rank in group.ranks:
        assert bagua.all_gather_object(rank, group=group) == group.ranks


@in_worlds(FEW_WORLDS)
def test_objects(pools, world):
    pools.run(world, check_objects)


def _unreadable():
    raise KeyError("vocab")


class Unreadable:
    def __reduce__(self):
        return _unreadable, ()


class ReadableAtHome:
    """Can be unpickled in the process that made it only."""

    def __reduce__(self):
        return _at_home, (os.getpid(),)


def _at_home(pid):
    if pid != os.getpid():
        raise OSError("the file is not on this host")
    return "read"


def check_bad_objects(rank, world_size):
    """An object that one rank cannot send or read: all ranks raise, with rank and type, and the group goes on."""
    group = bagua.get_default_group()
    bad = world_size - 1

    def calls(obj):
        value = obj if rank == bad else None
        return [lambda: bagua.broadcast_object(value, bad), lambda: bagua.all_gather_object(value)]

    plain = [lambda: group.broadcast_plain({"a": object()}, bad), lambda: group.all_gather_plain({1, object()})]
    cases = [(call, f"rank {bad} cannot send its function: ") for call in calls(lambda: 1)]
    cases += [
        (call, rf"rank 0 cannot read the Unreadable of rank {bad}: KeyError: 'vocab'") for call in calls(Unreadable())
    ]
    cases += [
        (call, f"rank 0 cannot read the ReadableAtHome of rank {bad}: OSError: ") for call in calls(ReadableAtHome())
    ]
    cases += [(plain[0], f"rank {bad} cannot send its dict: "), (plain[1], "rank 0 cannot send its set: ")]
    for call, message in cases:
        with pytest.raises(bagua.errors.InvalidArgument, match=message) as raised:
            call()
        assert raised.value.rank == int(message.split()[1])
        assert bagua.all_gather_object(rank) == list(range(world_size))
    pair = bagua.new_group([1, world_size - 1])
    if rank in pair.ranks:  # ranks of the job in the error
        with pytest.raises(bagua.errors.InvalidArgument, match="rank 1 cannot send its function") as raised:
            bagua.all_gather_object((lambda: 1) if rank == bad else 0, group=pair)
        assert raised.value.rank == bad


@pytest.mark.timed
def test_bad_objects(pools):
    started = time.monotonic()
    pools.run(shm(3), check_bad_objects)
    assert time.monotonic() - started < 10  # of a timeout of 30


def check_many(rank, world_size):
    """A hundred groups, each used once: what they hold is bounded by what is alive."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert total(1, bagua.new_group()) == world_size
    bagua.destroy_process_group()
    assert len(os.listdir("/proc/self/fd")) <= before


@in_worlds([shm(2)], slow=[tcp(2)])
def test_many_groups(pools, world):
    pools.run(world, check_many)


def check_come_and_go(rank, world_size):
    """Descriptors and threads after each of some groups that were used and closed, and are still referred to."""
    x, kept, counts = bagua.empty(20_000), [], []
    for index in range(12):
        group = bagua.new_group()
        bagua.all_reduce(x, group=group)
        bagua.all_reduce(torch.ones(20_000), group=group, codec="minmax_uint8")
        child = group.subgroup("child", range(world_size), 20.0)
        child.all_reduce(torch.ones(3)).wait()
        if index % 2:
            group.close()
        else:
            bagua.destroy_process_group(group)
        bagua.destroy_process_group(group)
        with pytest.raises(bagua.InvalidArgument, match="was destroyed"):
            bagua.all_reduce(x, group=group)
        kept += [group, child]
        bagua.barrier()
        counts.append(_held())
    # A thread that was joined may still count for a moment, until the kernel has taken it away.
    wait_until(
        lambda: all(now <= then for now, then in zip(_held(), counts[1], strict=True)),
        f"as few descriptors and threads as after the second group, of {counts}",
    )
    assert not bagua.get_default_group().subgroups


def _held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@in_worlds([tcp(2)], slow=[shm(2)])
def test_closed_groups_leave_nothing(pools, world):
    pools.run(world, check_come_and_go)


def check_destroy_all(rank, world_size):
    with pytest.raises(bagua.InvalidArgument, match=r"got 'world', expected None or a group made by bagua\.new_group"):
        bagua.destroy_process_group("world")
    group = bagua.new_group()
    bagua.destroy_process_group(bagua.get_default_group())
    assert not bagua.is_initialized()
    with pytest.raises(bagua.InvalidArgument, match="was destroyed"):
        group.barrier()
    bagua.destroy_process_group(group)


def test_destroying_the_default_group_destroys_all(pools):
    pools.run(shm(2), check_destroy_all)

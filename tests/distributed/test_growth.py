"""An hour's worth of steps leaves memory, descriptors and threads as they were after the first ones."""

import os

import pytest
import torch

import bagua
from tests.distributed.worlds import in_worlds, mixed, shm, tcp

# Ten steps a second for an hour.
NUM_STEPS = 36_000
# After these all memory is there.
NUM_FIRST = 1_000


def step(buffers, index):
    """What a training step may do: buckets in the background, a few blocking calls, sometimes an object or a group."""
    shared, ordinary, wide = buffers
    works = [
        bagua.all_reduce(shared, bagua.ReduceOp.AVG, async_op=True),
        bagua.all_reduce(ordinary, bagua.ReduceOp.AVG, codec="minmax_uint8", async_op=True),
        bagua.neighbor_average(shared, "exponential", index, async_op=True),
    ]
    bagua.all_gather(wide, ordinary)
    bagua.all_reduce(ordinary, bagua.ReduceOp.AVG, hierarchical=True)
    for work in works:
        work.wait()
    if index % 100 == 0:
        bagua.broadcast_object({"step": index}, 0)


def usage():
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def run_steps(rank, world_size, num_first, num_steps):
    buffers = bagua.empty(10_000), torch.zeros(10_000), torch.zeros(world_size * 10_000)
    for index in range(num_first):
        step(buffers, index)
    before = usage()
    for index in range(num_steps):
        step(buffers, index)
    return before, usage()


def check(results):
    for rank, (before, after) in enumerate(results):
        assert after[0] - before[0] < 2_000_000, f"rank {rank}: {before[0]} bytes, then {after[0]}"
        assert after[1:] == before[1:], f"rank {rank}: descriptors and threads {before[1:]}, then {after[1:]}"


def come_and_go(rank, world_size, rounds, num_groups):
    """What is resident after each round of groups that reduce a tensor of 1 MB."""
    resident = []
    for _ in range(rounds):
        for _ in range(num_groups):
            x = torch.ones(1 << 18)
            group = bagua.new_group()
            bagua.all_reduce(x, group=group)
            bagua.destroy_process_group(group)
        resident.append(usage()[0])
    return resident


@in_worlds([tcp(2)], slow=[shm(2)])
def test_closed_groups_do_not_keep_tensors_from_the_memory_of_earlier_ones(pools, world):
    """Each would take another 1 or 2 MB where something small stayed behind of the group before.

    malloc has areas of its own for threads, which the first groups fill.
    """
    for resident in pools.run(world, come_and_go, 6, 30):
        assert resident[-1] - resident[1] < 100 << 20, resident


@in_worlds([shm(2)], slow=[tcp(2)])
def test_a_minute_of_steps(pools, world):
    check(pools.run(world, run_steps, NUM_STEPS // 600, NUM_STEPS // 60))


@pytest.mark.slow("test_a_minute_of_steps")
@pytest.mark.timeout(900)
@in_worlds([shm(2), tcp(2), mixed(4)])
def test_an_hour_of_steps(pools, world):
    check(pools.run(world, run_steps, NUM_FIRST, NUM_STEPS, timeout=800))

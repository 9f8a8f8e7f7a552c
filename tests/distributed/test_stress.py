"""Thousands of random collectives against float64 loops; see stress.py. The seed is printed."""

import os
import random

import pytest

import bagua
from tests.distributed.stress import Memory, make_groups, random_call, start
from tests.distributed.worlds import in_worlds, mixed, shm, tcp

# How many operations may be under way together.
MOST_STARTED = 12


def run_plan(rank, world_size, seed, num_calls):
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    members = make_groups(world_size, shared)
    groups = [bagua.get_default_group(), *(bagua.new_group(ranks) for ranks in members[1:])]
    memory = Memory()
    under_way = []
    for index in range(num_calls):
        call = random_call(index, members, shared)
        if rank in call.members:
            try:
                under_way.append((call, start(call, groups[call.group], rank, memory)))
            except bagua.BaguaError as error:
                raise AssertionError(f"seed {seed}: {call} raised {error!r}") from error
        # Any order of waiting is legal: the order of the operations is that of their start.
        while under_way and (len(under_way) >= MOST_STARTED or own.random() < 0.3):
            finish(seed, memory, *under_way.pop(own.randrange(len(under_way))))
    for call, started in under_way:
        finish(seed, memory, call, started)


def finish(seed, memory, call, started):
    try:
        started.finish(call, memory)
    except (bagua.BaguaError, AssertionError) as error:
        raise AssertionError(f"seed {seed}, on {os.getpid()}: {call}: {error}") from error


@in_worlds([mixed(4)], slow=[shm(4), tcp(4)])
def test_random_collectives(pools, world):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    pools.run(world, run_plan, seed, 300, timeout=100)


@pytest.mark.slow("test_random_collectives")
@pytest.mark.timeout(1200)
@in_worlds([shm(4), tcp(4)])
def test_ten_thousand_random_collectives(pools, world):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    pools.run(world, run_plan, seed, 10_000, timeout=1100)

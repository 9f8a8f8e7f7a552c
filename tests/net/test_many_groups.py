"""Many groups in one process, as pipelines and expert parallelism make them, with a shell's usual descriptors."""

import os
import resource
import warnings

import pytest
import torch

import bagua
from bagua.testing import spawn
from tests.distributed.worlds import SAME_TEST

LIMIT = 1024


def reduce_in_all(rank, world_size, num_groups):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, limits[1]))
    bagua.init_process_group(timeout=60)
    try:
        groups = [bagua.new_group(list(range(world_size))) for _ in range(num_groups)]
        for number, group in enumerate(groups):
            tensor = torch.full((4,), float(number))
            bagua.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.full((4,), float(world_size * number)))
        return len(os.listdir("/proc/self/fd"))
    finally:
        bagua.destroy_process_group()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("shared_memory", ["0", pytest.param("1", marks=SAME_TEST)], ids=["tcp", "shm"])
@pytest.mark.parametrize("num_groups", [20, pytest.param(200, marks=pytest.mark.slow("the same test, 20 groups"))])
def test_groups_of_four_ranks_need_few_descriptors(pool4, num_groups, shared_memory):
    for num_open in pool4.run(reduce_in_all, args=[num_groups], env={"BAGUA_SHARED_MEMORY": shared_memory}):
        assert num_open < 0.75 * LIMIT


def opens_groups_until_no_descriptor_is_left(rank, world_size):
    bagua.init_process_group(timeout=30)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, before[1]))
    groups = []
    with warnings.catch_warnings(record=True) as seen, pytest.raises(bagua.errors.TransportError) as raised:
        warnings.simplefilter("always")
        for _ in range(100):
            groups.append(bagua.new_group())
    told = [str(one.message) for one in seen if one.category is ResourceWarning]
    for group in groups:
        bagua.destroy_process_group(group)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    bagua.destroy_process_group()
    return told, str(raised.value)


def test_groups_that_are_not_destroyed_are_told_of():
    for told, error in spawn(opens_groups_until_no_descriptor_is_left, 2):
        assert (
            len(told) == 1 and "groups of bagua's are open" in told[0] and "dropping one does not close it" in told[0]
        )
        assert "ulimit -n" in error and "groups that are not used any more" in error

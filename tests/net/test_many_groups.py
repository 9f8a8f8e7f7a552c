"""Many groups in one process, as pipelines and expert parallelism make them, with a shell's usual descriptors."""

import os
import resource

import pytest
import torch

import bagua

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


@pytest.mark.parametrize("shared_memory", ["0", "1"], ids=["tcp", "shm"])
@pytest.mark.parametrize("num_groups", [20, pytest.param(200, marks=pytest.mark.slow("the same test, 20 groups"))])
def test_groups_of_four_ranks_need_few_descriptors(pool4, num_groups, shared_memory):
    for num_open in pool4.run(reduce_in_all, args=[num_groups], env={"BAGUA_SHARED_MEMORY": shared_memory}):
        assert num_open < 0.75 * LIMIT

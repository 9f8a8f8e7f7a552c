"""Many groups in one process, as pipelines and expert parallelism make them, with as many descriptors as a shell gives."""

import os
import resource

import pytest
import torch

import bagua

NUM_GROUPS = 200
LIMIT = 1024


def reduce_in_all(rank, world_size):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, limits[1]))
    bagua.init_process_group(timeout=60)
    try:
        groups = [bagua.new_group(list(range(world_size))) for _ in range(NUM_GROUPS)]
        for number, group in enumerate(groups):
            tensor = torch.full((4,), float(number))
            bagua.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.full((4,), float(world_size * number)))
        return len(os.listdir("/proc/self/fd"))
    finally:
        bagua.destroy_process_group()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["0", "1"], ids=["tcp", "shm"])
def test_200_groups_of_four_ranks_work(pool4, shared_memory):
    for num_open in pool4.run(reduce_in_all, env={"BAGUA_SHARED_MEMORY": shared_memory}):
        assert num_open < 0.75 * LIMIT

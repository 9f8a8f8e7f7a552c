"""More than 2^31 elements: counts and offsets are 64 bits wide all the way down. Takes 10 GB."""

import pytest
import torch

import bagua
from tests.distributed.worlds import in_worlds, mixed, shm, tcp

pytestmark = [
    pytest.mark.slow("nothing: it takes so many elements to count them"),
    pytest.mark.timed,  # one operation takes a quarter of its deadline on two idle cores
]
NUMEL = (1 << 31) + 66
OFFSETS = [0, (1 << 31) - 1, 1 << 31, NUMEL - 1]


def marked(value, dtype=torch.uint8):
    x = torch.zeros(NUMEL, dtype=dtype)
    x[OFFSETS] = value
    return x


def check(x, value):
    assert x[OFFSETS].tolist() == [value] * len(OFFSETS)
    assert int(x.count_nonzero()) == len(OFFSETS)


def check_large(rank, world_size):
    x = marked(rank + 1)
    bagua.all_reduce(x)
    check(x, 3)
    if rank == 1:
        x.zero_()
    bagua.broadcast(x, 0)
    check(x, 3)
    if rank == 0:
        bagua.send(x, 1)
    else:
        x.zero_()
        bagua.recv(x, 0)
    check(x, 3)
    half = NUMEL // 2
    mine = x[rank * half : (rank + 1) * half].clone()
    bagua.all_gather(x.zero_(), mine)
    check(x, 3)


@pytest.mark.timeout(600)
@in_worlds([shm(2), tcp(2)])
def test_more_than_2_to_31_elements(pools, world):
    pools.run(world, check_large, timeout=300)


def check_large_coded(rank, world_size):
    x = marked(rank + 1, torch.bfloat16)
    bagua.all_reduce(x, codec="bf16")
    check(x, 3)
    bagua.all_reduce(x, bagua.ReduceOp.AVG, codec="minmax_uint8", hierarchical=True)
    check(x, 3)
    if rank == 1:
        x.zero_()
    bagua.broadcast(x, 0, codec="fp16")
    check(x, 3)
    x[OFFSETS] = 4 * rank
    bagua.neighbor_average(x, "ring", codec="bf16")
    check(x, 2)
    half = NUMEL // 2
    mine = x[rank * half : (rank + 1) * half].clone()
    bagua.all_gather(x.zero_(), mine, codec="bf16")
    check(x, 2)
    bagua.reduce_scatter(mine, x, codec="bf16")
    mine_at = [offset - rank * half for offset in OFFSETS if offset // half == rank]
    assert mine[mine_at].tolist() == [4] * len(mine_at)
    assert int(mine.count_nonzero()) == len(mine_at)


@pytest.mark.timeout(600)
@in_worlds([shm(2), mixed(2)])
def test_more_than_2_to_31_elements_through_a_codec(pools, world):
    pools.run(world, check_large_coded, timeout=300)

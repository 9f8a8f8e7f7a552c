"""bagua.empty: shared and ordinary memory in any mixture, views into it, and nothing left of what was freed."""

import gc
import itertools
import os

import psutil
import pytest
import torch

import bagua
from bagua import _C, ReduceOp
from tests.distributed.oracles import assert_reduced, assert_same, values
from tests.distributed.worlds import fast_in, mixed, process_group, shm, tcp
from tests.meeting import wait_until

# Around the sizes at which collectives begin to work in place, and one of many chunks; offsets into the memory.
CASES = [
    (dtype, numel, offset)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    for numel, offset in ((33, 5), (4097, 0), (65537, 5))
] + [(torch.float32, 500_003, 1)]


def shared_copy(x, offset):
    """x in memory of bagua.empty, `offset` elements behind its beginning."""
    storage = bagua.empty(x.numel() + offset, dtype=x.dtype)
    return storage[offset:].copy_(x)


def memory_of(rank, kind, x, offset):
    """Shared on all ranks, on rank 0 only, or on all but rank 0."""
    is_shared = {"all": True, "first": rank == 0, "others": rank != 0}[kind]
    return shared_copy(x, offset) if is_shared else x.clone()


def check_memory(rank, world_size, kind):
    for dtype, numel, offset in CASES:
        what = f"{kind} shared, {dtype}, {numel} elements at {offset}"
        inputs = [values(r, world_size, numel, dtype) for r in range(world_size)]
        wide = torch.cat(inputs)

        x = memory_of(rank, kind, inputs[rank], offset)
        bagua.all_reduce(x)
        assert_reduced(x, inputs, ReduceOp.SUM, f"all_reduce, {what}")

        x = memory_of(rank, kind, inputs[rank], offset)
        bagua.broadcast(x, world_size - 1)
        assert_same(x, inputs[-1], f"broadcast, {what}")

        source = memory_of(rank, kind, inputs[rank], offset)
        output = memory_of(rank, kind, torch.zeros_like(wide), offset)
        bagua.all_gather(output, source)
        assert_same(output, wide, f"all_gather, {what}")

        inputs = [values(r, world_size, numel * world_size, dtype) for r in range(world_size)]
        source = memory_of(rank, kind, inputs[rank], offset)
        output = memory_of(rank, kind, torch.zeros(numel, dtype=dtype), offset)
        bagua.reduce_scatter(output, source)
        blocks = [x.view(world_size, numel)[rank] for x in inputs]
        assert_reduced(output, blocks, ReduceOp.SUM, f"reduce_scatter, {what}")


@fast_in(
    "world, kind",
    [(shm(2), "all"), (shm(3), "others")],
    list(itertools.product([shm(2), shm(3), mixed(4)], ["all", "first", "others"])),
)
def test_shared_and_ordinary_memory_mix(pools, world, kind):
    pools.run(world, check_memory, kind)


def check_empty(rank, world_size):
    x = bagua.empty(3, 5, dtype=torch.int32)
    assert x.shape == (3, 5) and x.dtype == torch.int32 and x.is_contiguous() and not x.any()
    assert bagua.empty((2, 0)).shape == (2, 0) and bagua.empty().shape == ()
    with pytest.raises(bagua.InvalidArgument, match="negative"):
        bagua.empty(-1)
    with pytest.raises(bagua.InvalidArgument, match="more bytes than a process can address"):
        bagua.empty(2**61)
    return _C.is_shared(x.data_ptr(), x.nbytes)


def test_empty_is_shared_where_somebody_can_share_it(pools):
    assert pools.run(shm(2), check_empty) == [True, True]
    assert pools.run(shm(1), check_empty) == [False]
    assert pools.run(tcp(2), check_empty) == [False, False]


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def num_mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:bagua" in line for line in maps)


def check_reallocation(rank, world_size, rounds):
    """Every round allocates anew and works in place, so every rank maps the memory of every other."""
    process = psutil.Process()

    def churn(rounds):
        for i in range(rounds):
            x = bagua.empty(5000 + i % 7)
            x.fill_(rank)
            bagua.all_reduce(x)
            assert x[0] == x[-1] == world_size * (world_size - 1) / 2
        del x
        bagua.barrier()

    def usage():
        gc.collect()
        return num_descriptors(), num_mappings(), process.memory_info().rss

    churn(50)
    before = usage()
    churn(rounds)
    after = usage()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, f"descriptors, mappings: {before} -> {after}"
    assert after[2] - before[2] < 4 << 20, f"bytes in memory: {before} -> {after}"


@pytest.mark.timed
def test_reallocating_shared_memory_thousands_of_times_leaves_nothing(pools):
    pools.run(shm(2), check_reallocation, 3000)


def check_peers_let_go_at_once(rank, world_size):
    """What a rank frees, the others unmap although they call nothing any more."""
    x = bagua.empty(1 << 20)
    bagua.all_reduce(x)
    before = num_mappings()
    bagua.barrier()
    if rank == 0:
        del x
        gc.collect()
        return None
    wait_until(lambda: num_mappings() < before, "unmapped while idle")


def test_peers_let_go_of_freed_memory_while_idle(pools):
    pools.run(shm(2), check_peers_let_go_at_once)


def check_outlives_its_group(rank, world_size):
    x = bagua.empty(10_000)
    bagua.all_reduce(x)
    bagua.destroy_process_group()
    x += 1
    with process_group():
        bagua.all_reduce(x)  # the next group's peers may map it too
        assert x[0] == x[-1] == world_size


def test_shared_memory_outlives_its_group(pools):
    pools.run(shm(2), check_outlives_its_group)

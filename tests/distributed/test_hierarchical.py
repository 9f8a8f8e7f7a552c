"""all_reduce(hierarchical=True): right for nodes of equal and unequal size, over threads and processes."""

import functools

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.distributed.nodes import Nodes
from bagua.testing import world as thread_world
from tests.codec_specs import CONTRACTIONS, SPECS
from tests.distributed.oracles import DTYPES, FLOATS, assert_same, compressed_sum, ops_of, reduced, values
from tests.distributed.worlds import fast_in, in_worlds, mixed, shm, tcp

# The node of each rank.
LAYOUTS = ([0], [0, 0, 0], [0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1, 1], [0, 1, 0, 1, 0], [2, 0, 1, 0, 0, 2, 1])


@functools.lru_cache(maxsize=16)
def expected_reduction(size, numel, dtype, op):
    """Of all ranks, which are threads and share it; not to be changed (cached)."""
    return reduced([values(r, size, numel, dtype, small=True) for r in range(size)], op)


def check_reductions(group):
    for dtype in DTYPES:
        for numel in (0, 1, 33, 70_001):
            for op in ops_of(dtype)[: None if numel < 70_001 or dtype is torch.float32 else 1]:
                x = values(group.rank, group.size, numel, dtype, small=True).clone()
                group.all_reduce(x, op, hierarchical=True).wait()
                what = f"{op.name} {dtype} {numel} on {group.nodes.members}"
                expected = expected_reduction(group.size, numel, dtype, op)
                if op is ReduceOp.AVG:
                    # A half-precision average is a node average, weighted, averaged again: three roundings.
                    allowed = (4 if dtype.itemsize == 2 else 1) * torch.finfo(dtype).eps * expected.double().abs()
                    assert ((x.double() - expected.double()).abs() <= allowed).all(), what
                elif not (op is ReduceOp.PRODUCT and dtype.itemsize == 2 and dtype.is_floating_point):
                    assert_same(x, expected, what)


@fast_in("layout", [LAYOUTS[4], LAYOUTS[-1]], LAYOUTS)
def test_reductions(layout):
    thread_world(len(layout), check_reductions, nodes=layout)


def check_ranks_are_equal(group):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for codec in (None, *bagua.codecs.available()):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                x = torch.randn(50_000, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
                group.all_reduce(x, op, codec=codec, hierarchical=True).wait()
                everybody = torch.empty(group.size * len(x), dtype=dtype)
                group.all_gather(everybody, x).wait()
                for other in everybody.view(group.size, -1):
                    assert torch.equal(other, x), f"{dtype} {codec} {op.name}"


@fast_in("layout", [LAYOUTS[4]], LAYOUTS[3:])
def test_all_ranks_end_with_the_same_bits(layout):
    thread_world(len(layout), check_ranks_are_equal, nodes=layout)


def check_unequal_nodes_are_weighted_by_ranks(group):
    """One rank alone with 12, three with 0: the mean over ranks is 3, the mean of the nodes' means would be 6."""
    for dtype in FLOATS:
        for codec in (None, "minmax_uint8") if dtype is not torch.float64 else (None,):
            x = torch.full((5,), 12.0 if group.rank == 3 else 0.0, dtype=dtype)
            group.all_reduce(x, ReduceOp.AVG, codec=codec, hierarchical=True).wait()
            assert (x == 3).all(), f"{dtype} {codec}: {x}"


def test_unequal_nodes_are_weighted_by_ranks():
    thread_world(4, check_unequal_nodes_are_weighted_by_ranks, nodes=[0, 0, 0, 1])


def check_contractions(group):
    """What is encoded are the sums of the nodes, divided first where the result is an average."""
    for codec in CONTRACTIONS:
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            inputs = [torch.randint(-500, 500, (9000,), generator=_seeded(r)).float() for r in range(group.size)]
            x = inputs[group.rank].clone()
            group.all_reduce(x, op, codec=codec, hierarchical=True).wait()
            node_sums = [sum(inputs[r] for r in members) for members in group.nodes.members]  # whole numbers: exact
            if op is ReduceOp.AVG:
                node_sums = [(node_sum.double() * (1 / group.size)).float() for node_sum in node_sums]
            assert len(node_sums) > 1
            assert_same(x, compressed_sum(codec, node_sums, ReduceOp.SUM), f"{codec} {op.name}")


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


@fast_in("layout", [LAYOUTS[4], LAYOUTS[6]], [layout for layout in LAYOUTS if len({*layout}) > 1])
def test_contractions_are_of_the_sums_of_nodes(layout):
    thread_world(len(layout), check_contractions, nodes=layout)


def check_half_average_does_not_overflow(group):
    x = torch.full((100,), 60_000.0, dtype=torch.float16)
    group.all_reduce(x, ReduceOp.AVG, hierarchical=True).wait()
    assert (x == 60_000).all()


def check_sums_beyond_a_codecs_range(group):
    for codec in SPECS:
        if "dct=1" in codec:
            continue  # A few coefficients keep neither the constants nor the few numbers below.
        x = torch.full((3000,), 20_000.0)
        if not bagua.codecs.get(codec).keeps_constants:
            x[torch.arange(3000) % 300 > 0] = 0  # as few numbers in a block as any k
        expected = x.clone()
        group.all_reduce(x, ReduceOp.AVG, codec=codec, hierarchical=True).wait()
        assert (x - expected).abs().max() <= 20_000 / 255, f"{codec}: {x[0]}"


def test_averages_whose_sums_are_beyond_a_codecs_range():
    thread_world(4, check_sums_beyond_a_codecs_range, nodes=[0, 0, 1, 1])
    thread_world(5, check_sums_beyond_a_codecs_range, nodes=[0, 0, 0, 0, 1])


def test_the_average_of_large_halves_does_not_overflow():
    thread_world(5, check_half_average_does_not_overflow, nodes=[0, 0, 0, 1, 1])


def check_bytes(group, codec):
    """What a rank sends to others, beside what it would send if the nodes were groups of their own."""
    x = torch.ones(100_000)
    before = group.bytes_sent
    group.all_reduce(x, codec=codec, hierarchical=True).wait()
    hierarchical = group.bytes_sent - before
    node = group.subgroup(f"node {group.nodes.node_of(group.rank)}", group.nodes.node_of(group.rank), 20)
    node.reduce(x, 0).wait()
    node.broadcast(x, 0).wait()
    return hierarchical - node.bytes_sent


def test_bytes_between_nodes():
    """Between nodes one tensor per node travels, compressed where a codec is named."""
    for codec, numel_bytes in ((None, 4), ("bf16", 2), ("minmax_uint8", 1)):
        between = thread_world(5, check_bytes, codec, nodes=[0, 0, 1, 1, 1])
        for rank, sent in enumerate(between):
            expected = numel_bytes * 100_000 if rank in (0, 2) else 0
            assert expected <= sent <= 1.01 * expected, f"{codec}: {between}"  # and where the buffers lie


def check_asynchronous(group):
    tensors = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(12)]
    works = [group.all_reduce(x, hierarchical=i % 2 == 0) for i, x in enumerate(tensors)]
    for i, (work, x) in reversed(list(enumerate(zip(works, tensors, strict=True)))):
        work.wait()
        assert (x == sum(r + i for r in range(group.size))).all()


def test_asynchronous_and_mixed_with_flat_ones():
    thread_world(5, check_asynchronous, nodes=[0, 0, 1, 1, 1])


def check_between_processes(rank, world_size):
    group = bagua.get_default_group()
    check_reductions(group)
    check_ranks_are_equal(group)
    part = bagua.new_group(range(1, world_size))
    if rank > 0:
        x = torch.full((70_000,), float(rank))
        bagua.all_reduce(x, group=part, hierarchical=True)
        assert (x == sum(range(1, world_size))).all()
    x = bagua.empty(300_000)
    x.fill_(rank)
    bagua.all_reduce(x, ReduceOp.AVG, hierarchical=True)
    assert (x == sum(range(world_size)) / world_size).all()


@in_worlds([mixed(4)], slow=[shm(2), tcp(3)])
def test_between_processes(pools, world):
    pools.run(world, check_between_processes)


def check_mismatch(rank, world_size):
    x = torch.ones(10)
    with pytest.raises(bagua.BaguaError) as caught:
        for _ in range(2):
            bagua.all_reduce(x, hierarchical=rank == 1)
        bagua.barrier()
    assert "all_reduce #1 of 10 float32 (SUM), hierarchical" in str(caught.value), str(caught.value)
    assert "all ranks of a group must make the same calls" in str(caught.value), str(caught.value)


@in_worlds([mixed(4)], slow=[shm(2), tcp(2)])
def test_flat_on_one_rank_and_hierarchical_on_another(pools, world):
    pools.run(world, check_mismatch, timeout=20)


def test_nodes():
    hosts = "abacb"
    nodes = Nodes.of(5, lambda a, b: hosts[a] == hosts[b])
    assert nodes.members == ((0, 2), (1, 4), (3,))
    assert nodes.leaders == [0, 1, 3]
    assert nodes.node_of(4) == (1, 4)

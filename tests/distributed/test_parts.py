"""Reductions of values in several segments of memory: bit-equal to copying them into one tensor first."""

import itertools
import random

import pytest
import torch

import bagua
from bagua import ReduceOp
from tests.codec_specs import SPECS
from tests.distributed.worlds import fast_in, in_worlds, mixed, shm, tcp


def parts_of(generator, numel):
    """Random cuts, some parts empty, some gaps; (first element, number of elements)."""
    cuts = sorted(generator.randrange(numel + 1) for _ in range(2 * generator.randrange(1, 9)))
    return [(begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]


def random_parts(generator, numel, dtype):
    """They, and what they are in one tensor."""
    whole, parts = torch.zeros(numel, dtype=dtype), []
    for begin, count in parts_of(generator, numel):
        values = torch.randn(count).to(dtype)
        whole[begin : begin + count] = values
        parts.append((begin, values))
    return parts, whole


def check_parts(rank, world_size, dtype):
    group = bagua.get_default_group()
    generator = random.Random(rank)
    for turn, codec in enumerate((None, *SPECS)):
        for numel in (1, 2049, 300_001):
            for hierarchical in (False, True):
                torch.manual_seed(100 * rank + turn)
                parts, whole = random_parts(generator, numel, dtype)
                into = torch.full((numel,), 7.0, dtype=dtype)  # what was there before counts for nothing
                chosen = bagua.codecs.get(codec).with_seed(turn) if codec is not None else None
                options = {"codec": chosen, "hierarchical": hierarchical}
                group.all_reduce(into, ReduceOp.AVG, parts=parts, **options).wait()
                group.all_reduce(whole, ReduceOp.AVG, **options).wait()
                assert torch.equal(into, whole), (codec, numel, hierarchical, [(b, len(p)) for b, p in parts])


@fast_in(
    "world, dtype",
    [(shm(3), torch.float16), (tcp(2), torch.float32)],
    list(itertools.product([shm(1), shm(3), tcp(2), mixed(4)], [torch.float32, torch.float16])),
)
def test_parts_are_as_good_as_the_whole(pools, world, dtype):
    pools.run(world, check_parts, dtype)


def check_averages_of_parts(rank, world_size):
    group = bagua.get_default_group()
    generator = random.Random(rank)
    torch.manual_seed(rank)
    for topology in ("all", "ring", "shift_one", "exponential"):
        for codec in (None, "minmax_uint8"):
            for hierarchical in (False, True):
                for numel in (1, 300_001):
                    parts, whole = random_parts(generator, numel, torch.float32)
                    into = torch.full((numel,), 7.0)
                    options = {"codec": codec, "hierarchical": hierarchical}
                    group.neighbor_average(into, topology, 1, parts=parts, **options).wait()
                    group.neighbor_average(whole, topology, 1, **options).wait()
                    assert torch.equal(into, whole), (topology, codec, hierarchical, numel)


@in_worlds([shm(3), tcp(2)], slow=[shm(1), mixed(4)])
def test_averages_of_parts(pools, world):
    pools.run(world, check_averages_of_parts)


def check_parts_of_the_tensor_itself(rank, world_size):
    """Some parts are views of the tensor itself, at their own offsets."""
    group = bagua.get_default_group()
    tensor = torch.arange(100_000, dtype=torch.float32) * (rank + 1)
    expected = tensor.clone()
    elsewhere = torch.full((10_000,), float(rank))
    expected[40_000:50_000] = elsewhere
    parts = [(0, tensor[:40_000]), (40_000, elsewhere), (50_000, tensor[50_000:])]
    for codec in (None, "minmax_uint8"):
        into, whole = tensor.clone(), expected.clone()
        own = [(begin, into[begin : begin + len(part)] if begin != 40_000 else part) for begin, part in parts]
        group.all_reduce(into, parts=own, codec=codec).wait()
        group.all_reduce(whole, codec=codec).wait()
        assert torch.equal(into, whole)


def test_parts_of_the_tensor_itself(pools):
    pools.run(shm(2), check_parts_of_the_tensor_itself)


def check_bad_parts(rank, world_size):
    group = bagua.get_default_group()
    tensor = torch.ones(10)
    for parts, what in (
        ([(0, torch.ones(4)), (3, torch.ones(2))], "at offset 3, after one that ends at 4"),
        ([(8, torch.ones(3))], "a part of 3 .* in a tensor of 10"),
        ([(0, torch.ones(3, dtype=torch.float64))], "torch.float64"),
    ):
        with pytest.raises(bagua.InvalidArgument, match=what):
            group.all_reduce(tensor, parts=parts)
        with pytest.raises(bagua.InvalidArgument, match=what):
            group.neighbor_average(tensor, parts=parts)
    bagua.barrier()  # nothing was sent


def test_parts_that_do_not_fit(pools):
    pools.run(shm(2), check_bad_parts)

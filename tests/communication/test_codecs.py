"""all_reduce with every registered codec: the same bits on all ranks, errors within the bound that the codec states."""

import functools

import pytest
import torch

import bagua
from bagua import ReduceOp
from tests.communication.worlds import ALL_WORLDS, in_worlds, shm, tcp

SIZES = (0, 1, 3, 33, 2047, 2048, 2049, 40_001)
LARGE = 200_001
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # half a unit in the last place, relative


@functools.lru_cache(maxsize=16)
def gradient_like(rank, numel, dtype):
    """Seeded values of mixed scales; every rank can compute every rank's."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator))
    return x.to(dtype)


def block_ranges(x):
    """max - min of each block of 2048, for every element."""
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 2048), mode="constant", value=float("nan")).view(-1, 2048)
    low = torch.where(blocks.isnan(), torch.inf, blocks).amin(dim=1)
    high = torch.where(blocks.isnan(), -torch.inf, blocks).amax(dim=1)
    return (high - low).repeat_interleave(2048)[: len(x)]


def quantisation_bound(codec, x):
    """Largest error of one encoding of x, element by element, as the codec's documentation states it."""
    if codec == "minmax_uint8":
        return block_ranges(x) / 510 if len(x) else x
    return EPS[codec] * x.abs() + 2.0**-25


def check_codec(rank, world_size, codec):
    for dtype in DTYPES:
        for numel in (*SIZES, LARGE) if dtype is torch.float32 else SIZES:
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                what = f"{codec} {dtype} {numel} {op.name}"
                inputs = [gradient_like(r, numel, dtype).double() for r in range(world_size)]
                x = inputs[rank].to(dtype)
                bagua.all_reduce(x, op, codec=codec)
                everybody = torch.empty(world_size * numel, dtype=dtype)
                bagua.all_gather(everybody, x)
                for other in everybody.view(world_size, numel):
                    assert torch.equal(other.view(torch.uint8), x.view(torch.uint8)), f"{what}: not the same bits"
                if world_size == 1:
                    assert torch.equal(x, inputs[0].to(dtype)), f"{what}: one rank changes nothing"
                    continue
                check_error(codec, x, inputs, op, what)


def check_error(codec, x, inputs, op, what):
    """Each rank's contribution is encoded once, and the sum once more; blocks are cut from the whole tensor."""
    total = sum(inputs)
    first = sum(quantisation_bound(codec, rank_input) for rank_input in inputs)
    second = quantisation_bound(codec, total) + quantisation_bound_of_error(codec, first)
    bound = first + second
    if op is ReduceOp.AVG:
        total, bound = total / len(inputs), bound / len(inputs)
    # f32 arithmetic inside, and the rounding of the result to the tensor's type.
    rounding = (torch.finfo(x.dtype).eps + 8 * torch.finfo(torch.float32).eps) * (total.abs() + bound)
    tiny = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    allowed = bound + rounding + tiny
    wrong = (x.double() - total).abs() > allowed
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} elements out of bounds, first [{at}]: {x[at]}, exact {total[at]}, "
            f"allowed error {allowed[at]}"
        )


def quantisation_bound_of_error(codec, first):
    """What the first round's error can add to the bound of the second: the sum that is encoded contains it."""
    if not len(first):
        return first
    if codec == "minmax_uint8":
        padded = torch.nn.functional.pad(first, (0, -len(first) % 2048)).view(-1, 2048)
        return (2 * padded.amax(dim=1)).repeat_interleave(2048)[: len(first)] / 510
    return EPS[codec] * first


@pytest.mark.parametrize("codec", bagua.codecs.available())
@in_worlds(ALL_WORLDS)
def test_codec(pools, world, codec):
    pools.run(world, check_codec, codec)


def test_every_codec_has_a_bound_here():
    assert {"minmax_uint8", *EPS} == set(bagua.codecs.available()), "state the new codec's bound in this file"


def check_nonfinite(rank, world_size, codec):
    """A NaN or Inf of one rank never becomes an ordinary number, and is reported."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(5000)
        if rank == 0:
            x[2500] = bad
        work = bagua.all_reduce(x, codec=codec, async_op=True)
        work.wait()
        assert not x[2500].isfinite()
        assert torch.isfinite(x[:2048]).all() and torch.isfinite(x[4096:]).all(), "other blocks are not concerned"
        counts = torch.empty(world_size, dtype=torch.int64)
        bagua.all_gather(counts, torch.tensor([work.nonfinite_blocks]))
        assert counts[0] >= 1, f"rank 0 did not report its {bad}"


@pytest.mark.parametrize("codec", bagua.codecs.available())
def test_nonfinite_values_stay_nonfinite(pools, codec):
    pools.run(shm(3), check_nonfinite, codec)
    pools.run(tcp(2), check_nonfinite, codec)

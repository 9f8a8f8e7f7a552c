"""neighbor_average against the definitions of the topologies in plain loops, full and low precision."""

import functools

import pytest
import torch

import bagua
from bagua import _C
from bagua.testing import world as thread_world
from tests.codec_specs import SPECS
from tests.distributed.oracles import neighbor_weights
from tests.distributed.worlds import fast_in, in_worlds, mixed, shm, tcp

TOPOLOGIES = ("all", "ring", "shift_one", "exponential", "matching")
STEPS = (0, 1, 2, 5, 1000)
SIZES = (0, 1, 33, 2049, 300_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@functools.lru_cache(maxsize=256)
def values(rank, numel, dtype):
    """Not to be changed (cached)."""
    generator = torch.Generator().manual_seed(7 + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * (rank + 1)).to(dtype)


SEED = 99  # of codecs that round at random


@functools.lru_cache(maxsize=64)
def received(codec, rank, numel, dtype):
    """What the codec makes of a rank's values, in float32; not to be changed (cached)."""
    x = torch.zeros(numel)
    key = _C.derive_key(_C.derive_key(SEED, rank), 0)
    coder = bagua.codecs.get(codec)
    coder.decode_add(coder.encode(values(rank, numel, dtype), key=key), x, dtype)
    return x


@functools.lru_cache(maxsize=64)
def magnitudes(n, numel, dtype):
    """The sum over ranks of |x|; not to be changed (cached)."""
    return sum(values(r, numel, dtype).double().abs() for r in range(n))


def expected_average(topology, n, i, s, numel, dtype, codec=None):
    row = neighbor_weights(topology, n, i, s)
    total = torch.zeros(numel, dtype=torch.float64)
    for j in range(n):
        if row[j] == 0:
            continue
        x = values(j, numel, dtype) if codec is None or j == i else received(codec, j, numel, dtype)
        total += row[j] * x.double()
    return total


def check_full_precision(group, dtypes=DTYPES):
    for topology in TOPOLOGIES:
        for step in STEPS:
            for dtype in dtypes if step < 2 else dtypes[:1]:
                for numel in {0: SIZES[:4], 1: SIZES[2:] if dtype is dtypes[0] else SIZES[3:4]}.get(step, SIZES[2:3]):
                    what = f"{topology} at step {step}, {numel} {dtype}, rank {group.rank} of {group.size}"
                    x = values(group.rank, numel, dtype).clone()
                    group.neighbor_average(x, topology, step).wait()
                    exact = expected_average(topology, group.size, group.rank, step, numel, dtype)
                    # The mean of all is an all_reduce, which adds f32 in f32.
                    allowed = torch.finfo(dtype).eps * (exact.abs() + magnitudes(group.size, numel, dtype))
                    assert ((x.double() - exact).abs() <= allowed).all(), what
                    is_mean_of_all = len({*neighbor_weights(topology, group.size, group.rank, step)}) == 1
                    if not is_mean_of_all and dtype is not torch.float64:
                        assert torch.equal(x, exact.float().to(dtype)), f"{what}: rounded more than once"


@fast_in("size", [2, 5], range(1, 7))
def test_full_precision(size):
    thread_world(size, check_full_precision)


def check_low_precision(group, codecs):
    for codec in codecs:
        for topology in TOPOLOGIES:
            for step in (0, 3):
                for dtype in (torch.float32,) if step else (torch.float16, torch.bfloat16):
                    for numel in (SIZES if codec == codecs[0] else SIZES[:4]) if step else SIZES[2:4]:
                        x = values(group.rank, numel, dtype).clone()
                        seeded = bagua.codecs.get(codec).with_seed(SEED)
                        work = group.neighbor_average(x, topology, step, codec=seeded)
                        work.wait()
                        exact = expected_average(topology, group.size, group.rank, step, numel, dtype, codec)
                        what = f"{codec} {topology} at step {step}, {numel} {dtype}, rank {group.rank}"
                        assert torch.equal(x, exact.float().to(dtype)), what
                        assert work.nonfinite_blocks == 0


@fast_in("size", [5], [1, 2, 3, 5])
def test_low_precision(size):
    thread_world(size, check_low_precision, SPECS if size == 3 else bagua.codecs.available())


def check_mean(group):
    """The mean over ranks is what it was, and repeated averaging brings everybody to it."""
    for topology in TOPOLOGIES:
        mean = sum(values(r, 1000, torch.float64) for r in range(group.size)) / group.size
        x = values(group.rank, 1000, torch.float64).clone()
        for step in range(60):
            group.neighbor_average(x, topology, step).wait()
            total = x.clone()
            group.all_reduce(total, bagua.ReduceOp.AVG).wait()
            assert (total - mean).abs().max() < 1e-12, f"{topology}: the mean moved at step {step}"
        assert (x - mean).abs().max() < 1e-3 * mean.abs().max(), f"{topology} does not mix"


@fast_in("size", [5], [2, 4, 5])
def test_the_mean_is_preserved(size):
    thread_world(size, check_mean)


def check_equal_values_stay(group):
    x = values(0, 5000, torch.float32)
    for topology in TOPOLOGIES[1:]:
        for step in range(4):
            y = x.clone()
            group.neighbor_average(y, topology, step).wait()
            assert torch.equal(x, y)


def test_ranks_that_agree_stay_as_they_are():
    thread_world(5, check_equal_values_stay)


def check_between_processes(rank, world_size):
    group = bagua.get_default_group()
    check_full_precision(group, [torch.float32, torch.bfloat16])
    check_low_precision(group, ["minmax_uint8"])
    x = bagua.empty(300_001)
    x.copy_(values(rank, 300_001, torch.float32))
    work = bagua.neighbor_average(x, "exponential", 1, async_op=True)
    work.wait()
    exact = expected_average("exponential", world_size, rank, 1, 300_001, torch.float32)
    assert torch.equal(x, exact.float())


@in_worlds([tcp(3)], slow=[shm(2), shm(3), tcp(4), mixed(4)])
def test_between_processes(pools, world):
    pools.run(world, check_between_processes)


def check_bytes(group):
    x = torch.zeros(100_000)
    for topology, num_targets in (("ring", 2), ("shift_one", 1), ("exponential", 1)):
        for codec, bytes_each in ((None, 400_000), ("bf16", 200_000), ("minmax_uint8", 100_000 + 49 * 8)):
            before = group.bytes_sent
            group.neighbor_average(x, topology, 0, codec=codec).wait()
            assert group.bytes_sent - before == num_targets * bytes_each, f"{topology} {codec}"


def test_bytes_sent():
    thread_world(6, check_bytes)


def documented_bytes(topology, n, num_bytes):
    """Of one rank, a mean over steps, as docs/algorithms.md has it for `decentralized`."""
    if topology == "all" or (topology == "ring" and n <= 3):
        return 2 * (n - 1) / n * num_bytes
    if topology == "shift_one" and n % 2:
        return (n - 1) / n * num_bytes
    return 2 * num_bytes if topology == "ring" else num_bytes


@fast_in("n", [4, 5], [2, 3, 4, 5])
def test_bytes_of_the_topologies(n):
    """Over as many steps as every rank takes to have had its turn of resting."""
    x_bytes = 4 * 60_000

    def run(group):
        sent = {}
        for topology in TOPOLOGIES:
            before = group.bytes_sent
            for step in range(n):
                group.neighbor_average(torch.ones(x_bytes // 4), topology, step).wait()
            sent[topology] = (group.bytes_sent - before) / n
        return sent

    for sent in thread_world(n, run):
        for topology, num_bytes in sent.items():
            if topology == "matching" and n % 2:
                continue  # who rests is drawn
            assert num_bytes == pytest.approx(documented_bytes(topology, n, x_bytes), rel=1e-3), topology


def check_nonfinite(group):
    x = torch.zeros(10_000)
    if group.rank == 0:
        x[5000] = float("nan")
    work = group.neighbor_average(x, "ring", codec="minmax_uint8")
    work.wait()
    assert work.nonfinite_blocks == (1 if group.rank == 0 else 0)
    is_neighbour = group.rank in (0, 1, group.size - 1)
    assert bool(x[5000].isnan()) == is_neighbour
    assert x[:2048].isfinite().all()


def test_nonfinite_values_are_reported():
    thread_world(5, check_nonfinite)


def check_mistakes(group):
    x = torch.ones(3)
    for call, message in (
        (
            lambda: group.neighbor_average(x, "star"),
            "'star' is unknown; the topologies are all, exponential, mat",
        ),
        (lambda: group.neighbor_average(x, "ring", -1), "step -1 is not a non-negative integer"),
        (lambda: group.neighbor_average(x, "ring", 1.0), "step 1.0 is not a non-negative integer"),
        (lambda: group.neighbor_average(x.int()), "torch.int32 has no averages"),
        (lambda: group.neighbor_average(x, codec="zip"), "codec 'zip' is unknown"),
        (lambda: group.neighbor_average(x.double(), codec="bf16"), "cannot encode torch.float64"),
    ):
        with pytest.raises(bagua.InvalidArgument, match=message):
            call()


def test_mistakes():
    thread_world(2, check_mistakes)


def check_disagreement(rank, world_size):
    x = torch.ones(10)
    with pytest.raises(bagua.BaguaError) as caught:
        for _ in range(2):
            bagua.neighbor_average(x, "exponential", step=rank)
        bagua.barrier()
    assert "neighbor_average #1 of 10 float32 in topology exponential at step 0" in str(caught.value)
    assert "in topology exponential at step 1" in str(caught.value)


def test_ranks_at_different_steps_are_told(pools):
    pools.run(shm(2), check_disagreement)
    pools.run(tcp(2), check_disagreement)

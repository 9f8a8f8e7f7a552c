"""Collectives with every codec: bit-equal on every rank to encoding and decoding whole tensors in plain loops.

all_reduce also against the mean in float64, within the bound that the codec's documentation states; contractions, whose
loss is of the order of what is sent, have no such bound.
"""

import functools
import itertools

import pytest
import torch

import bagua
from bagua import _C, ReduceOp
from tests.codec_specs import ROUNDINGS, SPECS
from tests.distributed.oracles import compressed_sum, decoded_sum
from tests.distributed.worlds import ALL_WORLDS, fast_in, shm, tcp

SIZES = (0, 1, 3, 33, 2047, 2048, 2049, 40_001)
LARGE = 200_001
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # half a unit in the last place, relative
LEVELS = {"qsgd": 127, "qsgd:bits=4": 7, "qsgd:bits=2": 1}
SEED = 12345


def in_worlds_with_codecs(worlds, one_world, specs=SPECS):
    """Every codec in one world, one more in each of the others, each with some of the cases; slow are all codecs in
    all worlds with all cases, options in one world only."""
    others = [world for world in worlds if world != one_world]
    available = bagua.codecs.available()
    fast = [(one_world, spec) for spec in specs] + list(zip(others, itertools.cycle(available), strict=False))
    every = [(one_world, spec) for spec in SPECS] + list(itertools.product(others, available))
    return fast_in("world, codec, is_whole", [(*one, False) for one in fast], [(*one, True) for one in every])


def cases(is_whole):
    """(dtype, numel, op): every type with every size, and all with both operators or the operators in turns."""
    sizes = [(dtype, numel) for dtype in DTYPES for numel in ((*SIZES, LARGE) if dtype is torch.float32 else SIZES)]
    both = (ReduceOp.SUM, ReduceOp.AVG)
    for index, (dtype, numel) in enumerate(sizes):
        for op in both if is_whole else both[index % 2 :][:1]:
            yield dtype, numel, op


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


def block_norms(x):
    """max |x| of each block of 2048, for every element."""
    blocks = torch.nn.functional.pad(x.abs(), (0, -len(x) % 2048)).view(-1, 2048)
    return blocks.amax(dim=1).repeat_interleave(2048)[: len(x)]


def quantisation_bound(codec, x):
    """Largest error of one encoding of x, element by element, as the codec's documentation states it."""
    if codec == "minmax_uint8":
        return block_ranges(x) / 510 if len(x) else x
    if codec in LEVELS:
        return block_norms(x) / LEVELS[codec] if len(x) else x
    return EPS[codec] * x.abs() + 2.0**-25


def check_codec(rank, world_size, codec, is_whole):
    for dtype, numel, op in cases(is_whole):
        what = f"{codec} {dtype} {numel} {op.name}"
        inputs = [gradient_like(r, numel, dtype) for r in range(world_size)]
        x = inputs[rank].clone()
        bagua.all_reduce(x, op, codec=bagua.codecs.get(codec).with_seed(SEED))
        everybody = torch.empty(world_size * numel, dtype=dtype)
        bagua.all_gather(everybody, x)
        for other in everybody.view(world_size, numel):
            assert torch.equal(other.view(torch.uint8), x.view(torch.uint8)), f"{what}: not the same bits"
        if rank > 0:  # what rank 0 has is what this one has
            continue
        if world_size == 1:
            assert torch.equal(x, inputs[0]), f"{what}: one rank changes nothing"
            continue
        assert torch.equal(x, compressed_sum(codec, inputs, op, SEED)), f"{what}: not the definition"
        if codec in ROUNDINGS:
            check_error(codec, x, [y.double() for y in inputs], op, what)


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
    if codec in LEVELS:
        return block_norms(first) / LEVELS[codec]
    return EPS[codec] * first


@in_worlds_with_codecs(ALL_WORLDS, shm(3))
def test_codec(pools, world, codec, is_whole):
    pools.run(world, check_codec, codec, is_whole)


def test_every_codec_has_a_bound_here():
    assert {"minmax_uint8", *LEVELS, *EPS} == set(ROUNDINGS), "state the new codec's bound in this file"


def key_of(sender, begin=None):
    """What a sender draws from for the part of its tensor that begins at `begin`; None: the whole tensor."""
    key = _C.derive_key(SEED, sender)
    return key if begin is None else _C.derive_key(key, begin)


def passed_through(codec, x, key):
    """Q(x): what a receiver of x sees."""
    codec = bagua.codecs.get(codec)
    return codec.decode(codec.encode(x, key=key), x.numel(), x.dtype)


def check_movements(rank, world_size, codec):
    root = 0
    for dtype in DTYPES:
        for numel in (*SIZES, LARGE) if dtype is torch.float32 else SIZES:
            what = f"{codec} {dtype} {numel}"
            root = (root + 1) % world_size
            inputs = [gradient_like(r, numel, dtype) for r in range(world_size)]
            seeded = bagua.codecs.get(codec).with_seed(SEED)

            x = inputs[rank].clone()
            bagua.broadcast(x, root, codec=seeded)
            expected = inputs[root] if world_size == 1 else passed_through(codec, inputs[root], key_of(root))
            assert torch.equal(x, expected), f"broadcast {what} from {root}"

            output = torch.empty(world_size * numel, dtype=dtype)
            bagua.all_gather(output, inputs[rank], codec=seeded)
            decoded = inputs
            if world_size > 1:
                decoded = [passed_through(codec, x, key_of(sender, 0)) for sender, x in enumerate(inputs)]
            assert torch.equal(output, torch.cat(decoded)), f"all_gather {what}"

            splits = [[(3 * s + 5 * t) % 4 * (numel // 3) for t in range(world_size)] for s in range(world_size)]
            blocks = [gradient_like(s, sum(splits[s]), dtype).split(splits[s]) for s in range(world_size)]
            expected = [blocks[s][rank] for s in range(world_size)]
            output = torch.empty(sum(len(block) for block in expected), dtype=dtype)
            outgoing = [splits[s][rank] for s in range(world_size)]
            bagua.all_to_all(output, torch.cat(blocks[rank]), outgoing, splits[rank], codec=seeded)
            if world_size > 1:
                keys = [key_of(s, sum(splits[s][:rank])) for s in range(world_size)]
                expected = [passed_through(codec, block, key) for block, key in zip(expected, keys, strict=True)]
            assert torch.equal(output, torch.cat(expected)), f"all_to_all {what}"


def check_reduce_scatter(rank, world_size, codec, is_whole):
    for dtype, numel, op in cases(is_whole):
        inputs = [gradient_like(r, world_size * numel, dtype) for r in range(world_size)]
        output = torch.empty(numel, dtype=dtype)
        bagua.reduce_scatter(output, inputs[rank], op, codec=bagua.codecs.get(codec).with_seed(SEED))
        if world_size == 1:
            assert torch.equal(output, inputs[0])
            continue
        blocks = [x.view(world_size, numel)[rank] for x in inputs]
        keys = [key_of(sender, rank * numel) for sender in range(world_size)]
        total = decoded_sum(codec, blocks, op, keys)
        assert torch.equal(output, total.to(dtype)), f"reduce_scatter {op.name} {codec} {dtype} {numel}"


@in_worlds_with_codecs([shm(1), shm(2), shm(3), tcp(4)], shm(3), bagua.codecs.available())
def test_movements(pools, world, codec, is_whole):
    pools.run(world, check_movements, codec)
    pools.run(world, check_reduce_scatter, codec, is_whole)


def check_bytes(rank, world_size, codec):
    """What travels is codes: their size is that of the codec, by its own account."""
    group = bagua.get_default_group()
    n, numel = world_size, 40_000
    wire = bagua.codecs.get(codec).wire_bytes
    x, wide, other = torch.ones(numel), torch.ones(n * numel), torch.ones(n * numel)
    # At most this many bytes; who ends a chain sends less.
    for call, most in (
        (lambda: bagua.broadcast(x, 0, codec=codec), wire(numel, x.dtype)),
        (lambda: bagua.all_gather(wide, x, codec=codec), (n - 1) * wire(numel, x.dtype)),
        (lambda: bagua.reduce_scatter(x, wide, codec=codec), (n - 1) * wire(numel, x.dtype)),
        (lambda: bagua.all_to_all(other, wide, codec=codec), (n - 1) * wire(numel, x.dtype)),
    ):
        before = group.bytes_sent
        call()
        sent = group.bytes_sent - before
        assert sent == most or (sent == 0 and rank == n - 1)


@pytest.mark.parametrize("codec", SPECS)
def test_bytes_sent(pools, codec):
    pools.run(tcp(3), check_bytes, codec)


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

        x = torch.ones(5000)
        if rank == 0:
            x[2500] = bad
        wide = torch.empty(world_size * 5000)
        works = [
            bagua.broadcast(x, 0, codec=codec, async_op=True),
            bagua.all_gather(wide, torch.full((5000,), bad if rank == 0 else 1.0), codec=codec, async_op=True),
        ]
        for work in works:
            work.wait()
            assert (work.nonfinite_blocks > 0) == (rank == 0)
        assert not x[2500].isfinite() and x[:2048].isfinite().all()
        assert not wide[:5000].isfinite().any() and wide[5000:].isfinite().all()


@pytest.mark.parametrize("codec", SPECS)
def test_nonfinite_values_stay_nonfinite(pools, codec):
    pools.run(shm(3), check_nonfinite, codec)
    pools.run(tcp(2), check_nonfinite, codec)

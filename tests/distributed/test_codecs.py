"""Collectives with every codec: bit-equal on every rank to encoding and decoding whole tensors in plain loops.

How far a code is from its values, the conformance tests of codecs say.
"""

import functools
import itertools

import torch

import bagua
from bagua import _C, ReduceOp
from tests.codec_specs import SPECS
from tests.distributed.oracles import compressed_sum, decoded_sum
from tests.distributed.worlds import ALL_WORLDS, fast_in, in_turns, shm, tcp, through_torch

SIZES = (0, 1, 3, 33, 2047, 2048, 2049, 40_001)
LARGE = 200_001
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEED = 12345


def in_worlds_with_codecs(worlds, one_world, specs=SPECS):
    """Every codec in one of the first worlds, each with some of the cases; slow are all codecs in all worlds with all
    cases, options in one world only."""
    others = [world for world in worlds if world != one_world]
    available = bagua.codecs.available()
    fast = list(zip(itertools.cycle([shm(3), tcp(2), through_torch(3)]), specs, strict=False))
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


@in_worlds_with_codecs(ALL_WORLDS, shm(3))
def test_codec(pools, world, codec, is_whole):
    pools.run(world, check_codec, codec, is_whole)


def key_of(sender, begin=None):
    """What a sender draws from for the part of its tensor that begins at `begin`; None: the whole tensor."""
    key = _C.derive_key(SEED, sender)
    return key if begin is None else _C.derive_key(key, begin)


def passed_through(codec, x, key):
    """Q(x): what a receiver of x sees."""
    codec = bagua.codecs.get(codec)
    return codec.decode(codec.encode(x, key=key), x.numel(), x.dtype)


def check_movements(rank, world_size, codec, is_whole):
    root = 0
    for dtype in DTYPES:
        for numel in (*SIZES, LARGE) if dtype is torch.float32 else SIZES if is_whole else (33, 2049):
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
    pools.run(world, check_movements, codec, is_whole)
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


@fast_in("codec", ["minmax_uint8", "topk"], SPECS)
def test_bytes_sent(pools, codec):
    pools.run(tcp(3), check_bytes, codec)


def check_nonfinite(rank, world_size, codec):
    """A NaN or Inf of one rank never becomes an ordinary number, and is reported."""
    numel, at = 10_000, 5000  # in the third block of 2048, in the second of 4096
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(numel)
        if rank == 0:
            x[at] = bad
        work = bagua.all_reduce(x, codec=codec, async_op=True)
        work.wait()
        assert not x[at].isfinite()
        assert torch.isfinite(x[:4096]).all() and torch.isfinite(x[8192:]).all(), "other blocks are not concerned"
        counts = torch.empty(world_size, dtype=torch.int64)
        bagua.all_gather(counts, torch.tensor([work.nonfinite_blocks]))
        assert counts[0] >= 1, f"rank 0 did not report its {bad}"

        x = torch.ones(numel)
        if rank == 0:
            x[at] = bad
        wide = torch.empty(world_size * numel)
        works = [
            bagua.broadcast(x, 0, codec=codec, async_op=True),
            bagua.all_gather(wide, torch.full((numel,), bad if rank == 0 else 1.0), codec=codec, async_op=True),
        ]
        for work in works:
            work.wait()
            assert (work.nonfinite_blocks > 0) == (rank == 0)
        assert not x[at].isfinite() and x[:4096].isfinite().all()
        assert not wide[:numel].isfinite().any() and wide[numel:].isfinite().all()


@in_turns("codec, world", SPECS, [shm(3), tcp(2)])
def test_nonfinite_values_stay_nonfinite(pools, codec, world):
    pools.run(world, check_nonfinite, codec)

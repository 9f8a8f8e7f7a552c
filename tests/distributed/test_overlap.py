"""Inputs and outputs in one memory: right in the natural block of every collective, refused wherever else they meet."""

import itertools
import random

import numpy as np
import pytest
import torch

import bagua
from bagua import codecs
from bagua.distributed.memory_overlap import first_to_share, shares_with_itself
from tests.distributed.oracles import values
from tests.distributed.worlds import fast_in, in_worlds, shm, tcp, through_torch

# Of a block, in elements of float32: on both sides of 16 and of 32 KiB, where the selector takes another algorithm.
NUMELS = (5, 4096, 4097, 9000)
COLLECTIVES = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
READS_THE_WHOLE = ("reduce_scatter", "scatter", "all_to_all")


def placements(collective, rank, size, numel):
    """{name: (first element of the smaller buffer, counted from the beginning of the whole; whether it is allowed)}"""
    whole = size * numel
    if collective == "all_to_all":
        return {
            "the same": (0, False),
            "one later": (1, False),
            "the last element": (whole - 1, False),
            "behind": (whole, True),
            "before": (-whole, True),
        }
    return {
        "in place": (rank * numel, True),
        "one later": (rank * numel + 1, False),
        "one earlier": (rank * numel - 1, False),
        "in the block of the next": ((rank + 1) % size * numel, False),
        "half in": (-numel // 2, False),
        "the last element": (whole - 1, False),
        "behind": (whole, True),
        "before": (-numel, True),
    }


def expected(collective, rank, size, numel, dtype):
    """What the output holds, block by block from its definition; rank r's whole is values(r)."""
    inputs = [values(r, size, size * numel, dtype) for r in range(size)]
    blocks = [[x[b * numel : (b + 1) * numel] for b in range(size)] for x in inputs]
    if collective == "reduce_scatter":
        total = torch.zeros(numel, dtype=dtype)
        for r in range(size):
            total += blocks[r][rank]
        return total
    if collective == "scatter":
        return blocks[0][rank]
    if collective == "all_to_all":
        return torch.cat([blocks[r][rank] for r in range(size)])
    return torch.cat([blocks[r][r] for r in range(size)])  # every rank brings its own block


def call(collective, output, into, **options):
    if collective in ("gather", "scatter"):
        getattr(bagua, collective)(output, into, 0)
    else:
        getattr(bagua, collective)(output, into, **options)


def has_both(collective, rank):
    return rank == 0 or collective not in ("gather", "scatter")


def buffers(memory, collective, rank, size, numel, offset, dtype):
    """The whole and the small buffer in one piece of memory, filled for the collective."""
    whole = memory[size * numel :][: size * numel]
    small_numel = size * numel if collective == "all_to_all" else numel
    small = memory[size * numel + offset :][:small_numel]
    mine = values(rank, size, size * numel, dtype)
    if collective in READS_THE_WHOLE:
        small.fill_(0)
        whole.copy_(mine)
    else:
        whole.fill_(0)
        small.copy_(mine[rank * numel : (rank + 1) * numel])
    return (small, whole) if collective in READS_THE_WHOLE else (whole, small)


def check_table(rank, size, dtype):
    group = bagua.get_default_group()
    num_refused = 0
    for numel, collective, make in itertools.product(NUMELS, COLLECTIVES, (torch.empty, bagua.empty)):
        memory = make(3 * size * numel, dtype=dtype)
        want = expected(collective, rank, size, numel, dtype)
        for name, (offset, is_allowed) in placements(collective, rank, size, numel).items():
            what = f"{collective} of blocks of {numel} {dtype}, {name}, rank {rank} of {size}"
            if not has_both(collective, rank):
                if is_allowed:
                    mine = values(rank, size, size * numel, dtype)[rank * numel : (rank + 1) * numel]
                    output, source = (None, mine) if collective == "gather" else (memory[:numel], None)
                    call(collective, output, source)
                    assert output is None or torch.equal(output, want), what
                continue
            output, source = buffers(memory, collective, rank, size, numel, offset, dtype)
            before = source.clone()
            if is_allowed:
                call(collective, output, source)
                assert torch.equal(output, want), what
                if collective in READS_THE_WHOLE:  # beside the output nothing has changed
                    if name == "in place":
                        before[rank * numel : (rank + 1) * numel] = output
                    assert torch.equal(source, before), what
                continue
            num_refused += 1
            sent = group.bytes_sent
            for a, b in ((output, source), (output.numpy(), source.numpy())):
                with pytest.raises(bagua.InvalidArgument, match="overlaps it"):
                    call(collective, a, b)
            assert torch.equal(source, before) and group.bytes_sent == sent, what
    assert num_refused > 50


@fast_in(
    "world, dtype",
    [(shm(3), torch.float32), (tcp(2), torch.int32), (through_torch(3), torch.float64)],
    [
        *itertools.product([shm(2), shm(3), shm(4), tcp(3), tcp(4)], [torch.float32, torch.int32]),
        *((world, torch.float64) for world in (shm(2), shm(3), tcp(3), through_torch(3))),
    ],
)
def test_every_collective_at_every_offset(pools, world, dtype):
    pools.run(world, check_table, dtype)


def check_codecs(rank, size):
    """In place gives the bits that it gives apart."""
    for spec, dtype, numel in itertools.product(codecs.available(), (torch.float32, torch.bfloat16), (33, 5000)):
        codec = codecs.get(spec).with_seed(7)
        x = (values(rank, size, size * numel, torch.float32) % 37 - 11).to(dtype)
        mine = slice(rank * numel, (rank + 1) * numel)
        apart, in_place = torch.empty(numel, dtype=dtype), x.clone()
        bagua.reduce_scatter(apart, x, codec=codec)
        bagua.reduce_scatter(in_place[mine], in_place, codec=codec)
        assert torch.equal(in_place[mine], apart), (spec, dtype, numel)
        apart, in_place = torch.empty_like(x), torch.zeros_like(x)
        in_place[mine] = x[mine]
        bagua.all_gather(apart, x[mine], codec=codec)
        bagua.all_gather(in_place, in_place[mine], codec=codec)
        assert torch.equal(in_place, apart), (spec, dtype, numel)
        for call, output in ((bagua.all_to_all, x), (bagua.reduce_scatter, x[1 : numel + 1])):
            with pytest.raises(bagua.InvalidArgument, match="overlaps it"):
                call(output, x, codec=codec)


@in_worlds([shm(3)], slow=[tcp(2)])
def test_codecs_in_place(pools, world):
    pools.run(world, check_codecs)


def check_strided(rank, size):
    """Tensors with gaps are copied before and after, so whatever they share is read before it is written."""
    numel = 6000
    x = values(rank, size, size * numel, torch.float32)
    total = expected("reduce_scatter", rank, size, numel, torch.float32)
    for shift in (0, 2, 2 * numel - 4):
        memory = torch.zeros(4 * size * numel)
        source, output = memory[: 2 * size * numel : 2], memory[shift : shift + numel]
        source.copy_(x)
        bagua.reduce_scatter(output, source)  # the input is copied
        assert torch.equal(output, total), shift
        memory.zero_()
        source, output = memory[: size * numel], memory[shift : shift + 2 * numel : 2]
        source.copy_(x)
        bagua.reduce_scatter(output, source)  # the output is
        assert torch.equal(output, total), shift
    even, odd = memory[0 : 2 * size * numel : 2], memory[1 : 2 * numel : 2]  # share a span, and no element
    odd.copy_(x[rank * numel : (rank + 1) * numel])
    even.zero_()
    bagua.all_gather(even, odd)
    assert torch.equal(even, expected("all_gather", rank, size, numel, torch.float32))
    assert torch.equal(odd, x[rank * numel : (rank + 1) * numel])


@in_worlds([tcp(3)], slow=[shm(2)])
def test_tensors_with_gaps_may_overlap(pools, world):
    pools.run(world, check_strided)


# ---- what shares memory, against every pair of bytes


def bytes_of(begin, shape, strides, item):
    """The bytes of each element, strides in bytes."""
    for index in itertools.product(*map(range, shape)):
        first = begin + sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield range(first, first + item)


def meets(elements):
    """Whether a byte belongs to two of them."""
    seen = set()
    for element in elements:
        if not seen.isdisjoint(element):
            return True
        seen.update(element)
    return False


def test_shares_with_itself_equals_the_definition():
    draw = random.Random(1)
    found = {True: 0, False: 0}
    for _ in range(2500):
        num_dims, item = draw.randint(1, 4), draw.choice((1, 1, 2, 4))
        shape = [draw.randint(0 if draw.random() < 0.05 else 1, 5) for _ in range(num_dims)]
        strides = [draw.choice((1, -1)) * draw.randint(0 if draw.random() < 0.1 else 1, 30) for _ in range(num_dims)]
        want = meets(bytes_of(0, shape, strides, item))
        assert shares_with_itself(shape, strides, item) is want, (shape, strides, item)
        found[want] += 1
    assert min(found.values()) > 500


def test_first_to_share_equals_the_definition():
    draw = random.Random(2)
    memory = torch.zeros(200)
    found = {True: 0, False: 0}
    for _ in range(3000):
        tensors = []
        shape, strides = [draw.randint(1, 3), draw.randint(1, 4)], [draw.randint(1, 12), draw.randint(1, 6)]
        for _ in range(draw.randint(2, 4)):
            if draw.random() < 0.3:
                shape, strides = shape[::-1], [draw.randint(1, 12), draw.randint(1, 6)]
            if not shares_with_itself(shape, strides):
                tensors.append(memory.as_strided(shape, strides, draw.randint(0, 80)))
        num_written = draw.randint(0, len(tensors))
        written = [(draw.randint(0, 1), tensor) for tensor in tensors[:num_written]]
        read = [(draw.randint(0, 1), tensor) for tensor in tensors[num_written:]]
        both = [*written, *read]
        pairs = set()
        for (i, (a, x)), (j, (b, y)) in itertools.combinations(enumerate(both), 2):
            if i < num_written and (j < num_written or a != b):
                elements = [
                    *bytes_of(x.storage_offset(), x.shape, x.stride(), 1),
                    *bytes_of(y.storage_offset(), y.shape, y.stride(), 1),
                ]
                if meets(elements):
                    pairs.add((i, j))
        pair = first_to_share(written, read)
        assert (pair in pairs) if pairs else (pair is None), (pair, pairs, [(t.shape, t.stride()) for t in tensors])
        found[bool(pairs)] += 1
    assert min(found.values()) > 300


def test_large_layouts_are_decided_without_their_places():
    """Each of them has hundreds of millions of elements or more."""
    for shape, strides, item, want in (
        ((20000, 20000), (1, 1), 1, True),
        ((20000, 20000), (4, 4), 4, True),
        ((40000, 40000), (3, 40003 * 3), 1, False),
        ((10**9, 2), (2, 1), 1, False),
        ((10**9, 2), (2, 10**9 + 1), 1, False),
        ((10**9, 2), (2, 10**9), 1, True),
        ((3, 10**8, 2), (10**9, 2, 10**8 - 1), 1, False),
        ((2, 3, 10**8), (7, 4, 20), 4, True),
        ((2, 2, 10**8), (8, 4, 20), 4, False),
    ):
        assert shares_with_itself(shape, strides, item) is want, (shape, strides, item)
    columns = torch.empty(1000, 500).unbind(1)
    assert first_to_share([(0, column) for column in columns]) is None
    assert first_to_share([(0, column) for column in [*columns, columns[3][10:11]]]) == (3, 500)


def test_a_tensor_that_overlaps_itself_is_refused_at_once():
    def check(group):
        x = torch.empty(39999).as_strided((20000, 20000), (1, 1))
        with pytest.raises(bagua.InvalidArgument, match="overlaps itself"):
            group.all_reduce(x)
        with pytest.raises(bagua.InvalidArgument, match="overlaps itself"):
            group.all_reduce(np.lib.stride_tricks.as_strided(np.empty(39999, "f4"), (20000, 20000), (4, 4)))

    bagua.testing.world(1, check)


def all_bytes_of(tensor):
    strides = [tensor.element_size() * stride for stride in tensor.stride()]
    return set(itertools.chain.from_iterable(bytes_of(tensor.data_ptr(), tensor.shape, strides, tensor.element_size())))


def test_two_tensors_that_interleave():
    seed = random.randrange(2**32)
    draw, memory = random.Random(seed), torch.zeros(200, dtype=torch.uint8)
    num_shared = 0
    for _ in range(1000):
        pair = []
        for _ in range(2):
            dtype = draw.choice([torch.uint8, torch.int16])
            of_type = memory.view(dtype)
            dims = [(draw.randint(1, 4), draw.randint(0, 7)) for _ in range(draw.randint(1, 3))]
            pair.append(of_type.as_strided(*zip(*dims, strict=True), draw.randint(0, 20)))
        is_shared = not all_bytes_of(pair[0]).isdisjoint(all_bytes_of(pair[1]))
        assert (first_to_share([(0, pair[0]), (1, pair[1])]) is not None) == is_shared, f"seed {seed}: {pair}"
        num_shared += is_shared
    assert 0 < num_shared < 1000
    columns = torch.zeros(4000, 4000).split([1999, 2001], dim=1)  # by rows, not by elements: these are 16 million
    assert first_to_share(list(enumerate(columns))) is None

"""Every collective, type, operator and size, against plain loops, in every kind of world."""

import time

import numpy as np
import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.testing import world as thread_world
from tests.distributed.oracles import DTYPES, assert_reduced, assert_same, ops_of, values
from tests.distributed.worlds import ALL_WORLDS, FEW_WORLDS, in_worlds, mixed, shm, tcp

SIZES = (0, 1, 3, 33, 1025, 65537)
LARGE = 1_000_003


def all_values(world_size, numel, dtype, small=False):
    return [values(rank, world_size, numel, dtype, small) for rank in range(world_size)]


def cases():
    """Every type with every operator, the largest size with one operator only."""
    for dtype in DTYPES:
        for numel in SIZES:
            for op in ops_of(dtype)[: 1 if numel == SIZES[-1] else None]:
                yield dtype, numel, op


def check_all_reduce(rank, world_size):
    for dtype, numel, op in cases():
        inputs = all_values(world_size, numel, dtype, small=op is ReduceOp.PRODUCT)
        x = inputs[rank].clone()
        bagua.all_reduce(x, op)
        assert_reduced(x, inputs, op, f"all_reduce {op.name} {dtype} {numel}")
    inputs = all_values(world_size, LARGE, torch.float32)
    x = inputs[rank].clone()
    bagua.all_reduce(x)
    assert_reduced(x, inputs, ReduceOp.SUM, f"all_reduce {LARGE}")


# Over torch every result has the bits of the native transport (test_torch_transport.py).
@in_worlds([shm(3), tcp(2), mixed(4)], slow=ALL_WORLDS)
def test_all_reduce(pools, world):
    pools.run(world, check_all_reduce)


def check_reduce(rank, world_size):
    root = 0
    for dtype, numel, op in cases():
        root = (root + 1) % world_size
        inputs = all_values(world_size, numel, dtype, small=op is ReduceOp.PRODUCT)
        x = inputs[rank].clone()
        bagua.reduce(x, root, op)
        if rank == root:
            assert_reduced(x, inputs, op, f"reduce {op.name} {dtype} {numel} to {root}")


def check_reduce_scatter(rank, world_size):
    for dtype, numel, op in cases():
        inputs = all_values(world_size, numel * world_size, dtype, small=op is ReduceOp.PRODUCT)
        source, output = inputs[rank].clone(), torch.empty(numel, dtype=dtype)
        bagua.reduce_scatter(output, source, op)
        blocks = [x.view(world_size, numel)[rank] for x in inputs]
        what = f"reduce_scatter {op.name} {dtype} {numel}"
        assert_reduced(output, blocks, op, what)
        assert_same(source, inputs[rank], f"input of {what}")


@in_worlds([shm(2), tcp(3)], slow=ALL_WORLDS)
def test_reduce_and_reduce_scatter(pools, world):
    pools.run(world, check_reduce)
    pools.run(world, check_reduce_scatter)


def check_movements(rank, world_size):
    root = 0
    for dtype in DTYPES:
        for numel in SIZES if dtype is not torch.float32 else (*SIZES, LARGE):
            root = (root + 1) % world_size
            what = f"{dtype} {numel}"
            inputs = all_values(world_size, numel, dtype)
            mine = inputs[rank].clone()
            wide = torch.cat(inputs)

            x = mine.clone()
            bagua.broadcast(x, root)
            assert_same(x, inputs[root], f"broadcast {what} from {root}")

            output = torch.empty(world_size * numel, dtype=dtype)
            bagua.all_gather(output, mine)
            assert_same(output, wide, f"all_gather {what}")

            output = torch.empty(world_size * numel, dtype=dtype) if rank == root else None
            bagua.gather(output, mine, root)
            if rank == root:
                assert_same(output, wide, f"gather {what} to {root}")

            output = torch.empty(numel, dtype=dtype)
            bagua.scatter(output, wide.clone() if rank == root else None, root)
            assert_same(output, mine, f"scatter {what} from {root}")

            # Block r of rank s's input is values(s) rotated by r, so that no two blocks are alike.
            blocks = [[x.roll(r) for r in range(world_size)] for x in inputs]
            output = torch.empty(world_size * numel, dtype=dtype)
            bagua.all_to_all(output, torch.cat(blocks[rank]))
            assert_same(output, torch.cat([blocks[s][rank] for s in range(world_size)]), f"all_to_all {what}")
            assert_same(mine, inputs[rank], f"inputs {what}")
        bagua.barrier()


@in_worlds([shm(1), shm(3), tcp(2)], slow=ALL_WORLDS)
def test_movements(pools, world):
    pools.run(world, check_movements)


UNREDUCED = (
    *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


def every_byte(rank, world_size, dtype):
    """12 elements in which every byte has a value of its own, as (4, 3)."""
    numel = 12 * dtype.itemsize
    return torch.arange(numel, dtype=torch.int64).add(numel * rank).to(torch.uint8).view(dtype).view(4, 3)


def same_bytes(found, expected):
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def check_movements_of_other_types(group):
    """What only moves moves every type, bit for bit: those, too, that no operator is defined for."""
    rank, n = group.rank, group.size
    for dtype in UNREDUCED:
        inputs = [every_byte(r, n, dtype) for r in range(n)]
        wide = torch.cat(inputs)
        for mine in (inputs[rank].clone(), inputs[rank].t().contiguous().t()):  # and with gaps
            group.broadcast(mine, n - 1).wait()
            assert same_bytes(mine, inputs[n - 1]), dtype
        mine = inputs[rank]
        output = torch.empty_like(wide)
        group.all_gather(output, mine).wait()
        assert same_bytes(output, wide), dtype
        output = torch.empty_like(wide)
        group.gather(output if rank == 1 else None, mine, 1).wait()
        assert rank != 1 or same_bytes(output, wide), dtype
        output = torch.empty_like(mine)
        group.scatter(output, wide if rank == 0 else None, 0).wait()
        assert same_bytes(output, mine), dtype
        rows = [1, 0, 3][:n]  # of the rank that gets them
        output = torch.empty(n * rows[rank], 3, dtype=dtype)
        group.all_to_all(output, mine, [rows[rank]] * n, rows).wait()
        begin = sum(rows[:rank])
        assert same_bytes(output, torch.cat([x[begin : begin + rows[rank]] for x in inputs])), dtype
        if rank == 0:
            group.send(mine, 1).wait()
        elif rank == 1:
            output = torch.empty_like(mine)
            group.recv(output, 0).wait()
            assert same_bytes(output, inputs[0]), dtype
    conjugate = torch.complex(torch.ones(3) * rank, torch.ones(3)).conj()
    group.broadcast(conjugate, 1).wait()
    assert torch.equal(conjugate, torch.full((3,), 1 - 1j))
    for dtype in (np.int16, np.complex64):
        array = np.full((2, 3), rank, dtype=dtype)[:, ::-1]
        group.broadcast(array, 2).wait()
        np.testing.assert_array_equal(array, np.full((2, 3), 2, dtype=dtype))
    x = torch.zeros(4, dtype=torch.int16 if rank else torch.bfloat16)
    # The first rank to see it has both calls in its error, and others may have that this rank has left the operation.
    with pytest.raises((bagua.InvalidArgument, bagua.RemoteError), match="broadcast #.* of (4 bfloat16|8 uint8)"):
        group.broadcast(x, 0).wait()


def test_movements_of_other_types():
    thread_world(3, check_movements_of_other_types)


def check_uneven_all_to_all(rank, world_size):
    def rows(source, target):  # how many rows go from one rank to another, some of them none
        return (3 * source + 5 * target) % 4

    for row_shape in ((), (7,), (3, 5)):
        blocks = [
            [torch.full((rows(s, t), *row_shape), 10.0 * s + t) for t in range(world_size)] for s in range(world_size)
        ]
        expected = torch.cat([blocks[s][rank] for s in range(world_size)])
        output = torch.empty_like(expected)
        bagua.all_to_all(
            output,
            torch.cat(blocks[rank]),
            output_splits=[rows(s, rank) for s in range(world_size)],
            input_splits=[rows(rank, t) for t in range(world_size)],
        )
        assert_same(output, expected, f"rows of {row_shape}")


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS)
def test_all_to_all_with_uneven_splits(pools, world):
    pools.run(world, check_uneven_all_to_all)


def check_barrier(rank, world_size):
    for last in range(world_size):
        entered = torch.zeros(1, dtype=torch.int64)
        if rank == last:
            time.sleep(0.05)
        entered[0] = time.monotonic_ns()
        bagua.barrier()
        left = time.monotonic_ns()
        everybody = torch.empty(world_size, dtype=torch.int64)
        bagua.all_gather(everybody, entered)
        assert left >= int(everybody.max())


@in_worlds(FEW_WORLDS, slow=ALL_WORLDS)
def test_nobody_leaves_a_barrier_before_all_have_entered(pools, world):
    pools.run(world, check_barrier)

"""Mistakes of the caller: the message says what was wrong and what would work, and the group goes on."""

import numpy as np
import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.distributed.arguments import check_op
from tests.distributed.worlds import in_worlds, shm, tcp


def mistakes(rank, world_size):
    """(expected message, call)"""
    x, y = torch.ones(4), torch.ones(4 * world_size)
    integers, flags = torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    yield "SUM has no meaning for torch.bool; use BOR or BAND", lambda: bagua.all_reduce(flags)
    yield "AVG has no meaning for torch.int32", lambda: bagua.all_reduce(integers, ReduceOp.AVG)
    yield "BAND has no meaning for torch.float32", lambda: bagua.reduce(x, 0, ReduceOp.BAND)
    yield "BXOR has no meaning for torch.float32", lambda: bagua.reduce_scatter(x, y, ReduceOp.BXOR)
    yield "op 'sum' is not one of SUM, AVG, PRODUCT, MIN, MAX", lambda: bagua.all_reduce(x, "sum")
    yield "op 99 is not one of", lambda: bagua.all_reduce(x, 99)
    yield (
        "torch.complex64 is not supported here; the types are float32, .*; give torch.view_as_real of it",
        lambda: bagua.all_reduce(x.to(torch.cfloat)),
    )
    yield (
        r"torch.int16 is not supported here; .*; convert it",
        lambda: bagua.reduce(x.to(torch.int16), 0),
    )
    yield (
        "torch.quint8 is not supported here",
        lambda: bagua.broadcast(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), 0),
    )
    yield "is a list; give a torch.Tensor", lambda: bagua.all_reduce([1.0])
    yield "is a NoneType; give a torch.Tensor", lambda: bagua.all_gather(None, x)
    yield "layout torch.sparse_coo", lambda: bagua.all_reduce(x.to_sparse())
    yield "is on meta", lambda: bagua.all_reduce(torch.ones(3, device="meta"))
    yield (
        f"codec 'zip' is unknown; the codecs are {', '.join(bagua.codecs.available())}",
        lambda: bagua.all_reduce(x, codec="zip"),
    )
    yield "k is 9, expected one of 32, 8, 16, 64, 128, 256", lambda: bagua.all_reduce(x, codec="topk:k=9")
    yield 'codec "onebit" has no option "k"; it has none', lambda: bagua.all_gather(y, x, codec="onebit:k=8")
    yield "cannot encode torch.float64", lambda: bagua.all_reduce(x.double(), codec="bf16")
    yield "cannot encode torch.int32", lambda: bagua.all_reduce(integers, codec="minmax_uint8")
    yield "cannot be combined with MAX; use SUM or AVG", lambda: bagua.all_reduce(x, ReduceOp.MAX, codec="fp16")
    yield "cannot encode torch.int32", lambda: bagua.broadcast(integers, 0, codec="bf16")
    yield "codec 'zip' is unknown", lambda: bagua.all_gather(y, x, codec="zip")
    yield "cannot encode torch.float64", lambda: bagua.all_to_all(x.double(), x.double(), codec="bf16")
    yield "cannot be combined with MIN; use SUM or AVG", lambda: bagua.reduce_scatter(x, y, ReduceOp.MIN, codec="bf16")
    yield "BAND has no meaning for torch.float32", lambda: bagua.all_reduce(x, ReduceOp.BAND, hierarchical=True)
    yield "src 9 is not a rank of the group 'world'", lambda: bagua.broadcast(x, 9)
    yield "dst -1 is not a rank", lambda: bagua.reduce(x, -1)
    yield "output has 4 elements", lambda: bagua.all_gather(x, x)
    yield "input has 4 elements", lambda: bagua.reduce_scatter(x, x)
    yield "input is torch.int32 but output is torch.float32", lambda: bagua.all_gather(y, integers)
    yield "is torch.float32 but output is torch.int32", lambda: bagua.all_to_all(integers, x)
    yield "input has 3 rows, not a multiple of 2; give input_splits", lambda: bagua.all_to_all(x, torch.ones(3))
    yield "output_splits .* must be 2 non-negative numbers that add up to 4", lambda: bagua.all_to_all(x, x, [1, 2])
    yield "input_splits .* add up to 4", lambda: bagua.all_to_all(x, x, [2, 2], [5, -1])
    yield "output_splits .* must be 2 whole numbers", lambda: bagua.all_to_all(x, x, [2.5, 1.5])
    yield "group is of type object, expected a group of .*DeviceMesh", lambda: bagua.all_reduce(x, group=object())
    yield r"size \(2.5,\) is no shape", lambda: bagua.empty(2.5)
    yield r"size \(-1, -2\) is no shape", lambda: bagua.empty(-1, -2)
    yield "tag -1 is not a number from 0 to", lambda: bagua.get_default_group().send(x, 1 - rank, tag=-1)
    yield "init_process_group was called before", lambda: bagua.init_process_group()


def check_mistakes(rank, world_size):
    for message, call in mistakes(rank, world_size):
        with pytest.raises(bagua.InvalidArgument, match=message):
            call()
        z = torch.full((3,), float(rank))
        bagua.all_reduce(z)
        assert (z == sum(range(world_size))).all(), f"after {message!r}"
    # A mistake of one rank alone is its own business as long as it corrects it in time.
    if rank == 0:
        with pytest.raises(ValueError):
            bagua.all_reduce(z, codec="zip")
    bagua.all_reduce(z)


@in_worlds([tcp(2)], slow=[shm(2)])
def test_mistakes_do_not_poison_the_group(pools, world):
    pools.run(world, check_mistakes)


def check_shapes(rank, world_size):
    assert bagua.empty().shape == ()
    assert bagua.empty(2, 0).shape == (2, 0)
    for size in (3, (2, 3), torch.Size([2, 3]), np.int64(3), np.array([2, 3])):
        assert bagua.empty(size).shape == np.empty(size).shape


def test_shapes(pools):
    pools.run(shm(1), check_shapes)


def test_nothing_works_before_init():
    assert not bagua.is_initialized()
    for call in (lambda: bagua.all_reduce(torch.ones(1)), bagua.get_rank, bagua.barrier, lambda: bagua.empty(1)):
        with pytest.raises(bagua.InvalidArgument, match=r"not initialised; call bagua.init_process_group\(\) first"):
            call()
    bagua.destroy_process_group()  # idempotent


def check_after_destroy(rank, world_size):
    group = bagua.get_default_group()
    bagua.destroy_process_group()
    bagua.destroy_process_group()
    assert not bagua.is_initialized()
    with pytest.raises(bagua.InvalidArgument, match="group 'world' was destroyed; call init_process_group"):
        group.all_reduce(torch.ones(1))


def test_after_destroy(pools):
    pools.run(shm(2), check_after_destroy)


def test_operators_of_torch_distributed_are_taken(pools):
    pools.run(shm(2), check_torch_ops)


def check_torch_ops(rank, world_size):
    import torch.distributed as dist

    for op, expected in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 0), (ReduceOp.AVG, 0.5)):
        x = torch.tensor([float(rank)])
        bagua.all_reduce(x, op)
        assert x == expected


def test_what_each_operator_has_a_meaning_for():
    arithmetic, order, bitwise = {"SUM", "PRODUCT"}, {"MIN", "MAX"}, {"BAND", "BOR", "BXOR"}
    of_floating = arithmetic | order | {"AVG"}
    of_integers = arithmetic | order | bitwise
    meaningful = {
        **dict.fromkeys([torch.float32, torch.float64, torch.float16, torch.bfloat16], of_floating),
        **dict.fromkeys([torch.int8, torch.uint8, torch.int32, torch.int64], of_integers),
        torch.bool: order | bitwise,
    }
    for dtype, names in meaningful.items():
        for op in ReduceOp:
            for given in (op, int(op), getattr(torch.distributed.ReduceOp, op.name)):
                if op.name in names:
                    assert check_op(given, dtype) is op
                else:
                    with pytest.raises(bagua.InvalidArgument, match=f"{op.name} has no meaning for {dtype}"):
                        check_op(given, dtype)

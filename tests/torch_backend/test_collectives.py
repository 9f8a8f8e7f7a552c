"""Every collective of torch.distributed on the backend bagua gives what it gives on gloo, in every form and type."""

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.distributed.worlds import SAME_TEST
from tests.torch_backend.programs import compare, needs_torch, run, values

pytestmark = needs_torch

REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
MOVED = [*REDUCED, torch.bool, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]


@pytest.fixture(params=[2, pytest.param(4, marks=SAME_TEST)])
def pool(request, pool2, pool4):
    return pool2 if request.param == 2 else pool4


def bits(tensor):
    """Converts a tensor for assert_close: float8 and uint16 become bytes."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.uint16) else tensor


def reductions(rank, world_size):
    found = {}
    for dtype in REDUCED:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            x = values(rank, world_size, 33, dtype) % 3
            dist.all_reduce(x, op)
            y = values(rank, world_size, 33, dtype) % 3
            dist.reduce(y, dst=1, op=op)
            # On the others gloo's reduce leaves an undefined value.
            found[f"{dtype} {op}"] = (x, y if rank == 1 else None)
        parts = [values(rank + 10 * part, world_size, 7, dtype) % 5 for part in range(world_size)]
        out = torch.empty(7, dtype=dtype)
        dist.reduce_scatter(out, parts)
        single = torch.empty(7, dtype=dtype)
        dist.reduce_scatter_tensor(single, torch.cat(parts))
        found[f"{dtype} reduce_scatter"] = (out, single)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = values(rank, world_size, 33, torch.int32)
        dist.all_reduce(x, op)
        found[str(op)] = x
    z = torch.complex(values(rank, world_size, 5), values(rank, world_size, 5))
    for dtype in (torch.complex64, torch.complex128):
        x, y = z.to(dtype, copy=True), z.to(dtype, copy=True)
        dist.all_reduce(x)
        dist.reduce(y, dst=1)
        out, single = torch.empty(2, dtype=dtype), torch.empty(2, dtype=dtype)
        parts = [torch.full((2,), complex(rank, part), dtype=dtype) for part in range(world_size)]
        dist.reduce_scatter(out, parts)
        dist.reduce_scatter_tensor(single, torch.cat(parts))
        found[f"{dtype}"] = (x, y if rank == 1 else None, out, single)
    return found


def test_reductions(pool):
    compare(pool, reductions)


def block(rank, world_size, dtype):
    return values(rank, world_size, 6).to(dtype).view(2, 3)


def movements(rank, world_size, dtypes):
    found = {}
    for dtype in dtypes:
        mine = block(rank, world_size, dtype)
        x = mine.clone()
        dist.broadcast(x, src=1)
        gathered = [torch.zeros_like(mine) for _ in range(world_size)]
        dist.all_gather(gathered, mine)
        single = torch.zeros(2 * world_size, 3, dtype=dtype)
        dist.all_gather_into_tensor(single, mine)
        at_root = [torch.zeros_like(mine) for _ in range(world_size)] if rank == 1 else None
        dist.gather(mine, at_root, dst=1)
        share = torch.zeros_like(mine)
        dist.scatter(share, [part.clone() for part in gathered] if rank == 0 else None, src=0)
        peer = rank ^ 1
        received = torch.zeros_like(mine)
        if rank < peer:
            dist.send(mine, peer)
            assert dist.recv(received, peer) == peer
        else:
            dist.recv(received, peer)
            dist.send(mine, peer)
        exchanged = torch.zeros_like(single)
        dist.all_to_all_single(exchanged, single)  # rows 2r and 2r + 1 are those of rank r
        found[dtype] = [bits(t) for t in (x, *gathered, single, *(at_root or []), share, received, exchanged)]
    return found


def moved(rank, world_size, dtype):
    """Computes the results of movements() in plain loops."""
    blocks = [block(r, world_size, dtype) for r in range(world_size)]
    everything = torch.cat([bits(b) for b in blocks])
    # single holds the same on all ranks, and every rank sends its r-th block to rank r.
    rows = bits(blocks[rank]).repeat(world_size, 1)
    return [
        *[bits(b) for b in (blocks[1], *blocks)], everything, *([bits(b) for b in blocks] if rank == 1 else []),
        bits(blocks[rank]), bits(blocks[rank ^ 1]), rows,
    ]  # fmt: skip


def test_movements(pool):
    compare(pool, movements, [dtype for dtype in REDUCED if dtype is not torch.bfloat16])


def test_movements_of_types_that_gloo_does_not_have(pool2):
    for rank, found in enumerate(run(pool2, movements, MOVED)):
        for dtype, tensors in found.items():
            for tensor, expected in zip(tensors, moved(rank, 2, dtype), strict=True):
                assert torch.equal(tensor, expected), f"{dtype} on rank {rank}: {tensor} is not {expected}"


def shapes(rank, world_size):
    """Tensors that are transposed, have no dimension, or no element."""
    found = []
    for make in (
        lambda: values(rank, world_size, 12).view(3, 4).t(),
        lambda: torch.tensor(float(rank + 1)),
        lambda: torch.empty(0, 3),
    ):
        x = make()
        dist.broadcast(x, src=0)
        gathered = [torch.zeros_like(x) for _ in range(world_size)]
        dist.all_gather(gathered, make().contiguous())
        found += [x, *gathered]
        if x.is_floating_point():
            y = make()
            dist.all_reduce(y, async_op=True).wait()
            z = make()
            future = dist.all_reduce(z, async_op=True).get_future()
            future.wait()
            found += [y, z]
    return found


def test_shapes(pool):
    compare(pool, shapes)


def slices(rank, world_size):
    """Tensors with gaps, where gloo reduces what lies in the gaps or raises; the oracle is a loop."""
    for finish in (lambda work: work.wait(), lambda work: work.get_future().wait(), until_completed):
        whole = values(rank, world_size, 24).view(4, 6)
        finish(dist.all_reduce(whole[::2, 1::2], async_op=True))
        expected = values(rank, world_size, 24).view(4, 6)
        expected[::2, 1::2] = sum(values(r, world_size, 24).view(4, 6)[::2, 1::2] for r in range(world_size))
        assert torch.equal(whole, expected)
    lazy = torch.tensor([1.0 + 2.0j]).conj().imag  # its memory holds 2, its value is -2
    assert lazy.is_neg()
    x = lazy if rank == 0 else torch.zeros(1)
    dist.broadcast(x, src=0)
    assert x.item() == -2
    odd = values(rank, world_size, 12, torch.int16)[1::2]
    dist.broadcast(odd, src=1)
    assert torch.equal(odd, values(1, world_size, 12, torch.int16)[1::2])
    mine = values(rank, world_size, 6).view(2, 3)
    wide = torch.zeros(world_size, 2, 6)
    dist.all_gather([wide[r, :, ::2] for r in range(world_size)], mine)
    into = torch.zeros(3 * world_size, 4)[:, ::2]
    dist.all_gather_into_tensor(into, mine.t().contiguous(), async_op=True).wait()
    for r in range(world_size):
        other = values(r, world_size, 6).view(2, 3)
        assert torch.equal(wide[r, :, ::2], other) and not wide[r, :, 1::2].any()
        assert torch.equal(into[3 * r : 3 * r + 3], other.t())


def until_completed(work):
    while not work.is_completed():
        pass
    assert work.is_success() and work.exception() is None


def test_tensors_with_gaps(pool):
    run(pool, slices)


def uneven_all_to_all(rank, world_size):
    """Rank r sends s + 1 rows to rank s, once as one tensor and once as lists."""
    rows = [r + 1 for r in range(world_size)]
    found = []
    for dtype in (torch.float32, torch.int16, torch.complex128):
        mine = values(rank, world_size, 2 * sum(rows), dtype).view(-1, 2)
        out = torch.zeros((rank + 1) * world_size, 2, dtype=dtype)
        dist.all_to_all_single(out, mine, [rank + 1] * world_size, rows)
        parts = [torch.zeros(rank + 1, 2, dtype=dtype) for _ in range(world_size)]
        dist.all_to_all(parts, list(mine.split(rows)))
        assert torch.equal(torch.cat(parts), out)
        begin = sum(rows[:rank])
        for r in range(world_size):
            theirs = values(r, world_size, 2 * sum(rows), dtype).view(-1, 2)
            assert torch.equal(parts[r], theirs[begin : begin + rank + 1])
        found.append(out)
    return found


def test_uneven_all_to_all(pool):
    run(pool, uneven_all_to_all)


def coalesced(rank, world_size):
    xs = [values(rank, world_size, numel) for numel in (3, 100, 0)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    outs = [torch.zeros(numel * world_size) for numel in (3, 100)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, numel in zip(outs, (3, 100), strict=True):
            dist.all_gather_into_tensor(out, values(rank, world_size, numel))
    manager.wait()
    lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, [values(rank, world_size, 3), values(rank, world_size, 4).view(2, 2)])
    assert all(torch.equal(lists[r][0], values(r, world_size, 3)) for r in range(world_size))
    shards = [torch.zeros(5), torch.zeros(2)]
    with dist._coalescing_manager():
        for shard in shards:
            dist.reduce_scatter_tensor(shard, values(rank, world_size, shard.numel() * world_size))
    return [*xs, *outs, *shards, lists]


def test_coalesced(pool):
    compare(pool, coalesced)


def average(rank, world_size):
    x = values(rank, world_size, 10)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    torch.testing.assert_close(x, sum(values(r, world_size, 10) for r in range(world_size)) / world_size)


def test_average_which_gloo_does_not_have(pool):
    run(pool, average)


def reduce_keeps_the_others(rank, world_size):
    for numel in (10, 1000, 300_000):
        x = values(rank, world_size, numel)
        dist.reduce(x, dst=0)
        total = sum(values(r, world_size, numel) for r in range(world_size))
        assert torch.equal(x, total if rank == 0 else values(rank, world_size, numel))


def test_reduce_leaves_the_tensors_of_the_others_alone(pool):
    run(pool, reduce_keeps_the_others)


def messages(rank, world_size):
    """A batch around the ring, and messages with tags in the order in which they were sent."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    out, into = values(rank, world_size, 1000), torch.zeros(1000)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]):
        work.wait()
    tagged = [torch.zeros(4) for _ in range(3)]
    works = [dist.isend(values(rank, world_size, 4) + tag, right, tag=tag) for tag in range(3)]
    for tag in range(3):
        dist.recv(tagged[tag], left, tag=tag)
    for work in works:
        work.wait()
    return [into, *tagged]


def test_messages(pool):
    compare(pool, messages)


def refusals(rank, world_size):
    """Unsupported calls raise on the rank itself, and the group continues to work."""
    x = torch.ones(4)
    cases = [
        (lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)), "PREMUL_SUM"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16)), "int16"),
        (lambda: dist.all_reduce(torch.eye(3).to_sparse()), "to_dense"),
        (lambda: dist.broadcast(torch.ones(3, device="meta"), 0), "CPU"),
        (lambda: dist.broadcast(torch.ones(3, dtype=torch.int16, device="meta"), 0), "CPU"),
        (lambda: dist.all_gather([torch.ones(r + 1) for r in range(world_size)], x), "tensor_list\\[0\\]"),
        (lambda: dist.all_gather([x], x), "one for each"),
        (lambda: dist.recv(x), "src="),
        (lambda: dist.group.WORLD.alltoall([x, x], [x, x.double()]), "float32 and torch.float64"),
        (lambda: dist.group.WORLD.alltoall([x, x.double()], [x, x]), "float32 and torch.float64"),
        (lambda: dist.group.WORLD.allreduce(x), "a list of one"),
        (lambda: dist.isend(x, 1 - rank, tag=-1), "tag -1"),
        (lambda: dist.reduce(x.to(torch.complex64), 0, dist.ReduceOp.MAX), "MAX has no meaning for torch.complex64"),
    ]
    for call, expected in cases:
        with pytest.raises(bagua.InvalidArgument, match=expected):
            call()
    dist.all_reduce(x)
    assert x[0] == world_size


def test_refusals(pool2):
    run(pool2, refusals)


def crossed_tags(rank, world_size):
    if rank == 0:
        dist.isend(torch.ones(3), 1, tag=7)
        with pytest.raises(bagua.BaguaError):
            dist.recv(torch.ones(3), 1)
    else:
        with pytest.raises(bagua.InvalidArgument, match="tag 7.*tag 8"):
            dist.recv(torch.ones(3), 0, tag=8)


def test_messages_with_other_tags_are_an_error(pool2):
    run(pool2, crossed_tags)

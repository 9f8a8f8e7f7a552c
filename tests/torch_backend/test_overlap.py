"""torch.distributed on bagua: outputs inside inputs, lists whose tensors share memory, tensors without memory."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bagua
from tests.torch_backend.programs import needs_torch, run, values

pytestmark = needs_torch
DTYPES = (torch.float32, torch.float64, torch.int32)


def in_place(rank, world_size):
    """The shard is a part of the buffer, as in calls of Megatron's optimizer."""
    for dtype in DTYPES:
        for numel in (7, 5000, 20000):
            everyone = [values(r, world_size, world_size * numel, dtype) for r in range(world_size)]
            mine = slice(rank * numel, (rank + 1) * numel)
            total = torch.zeros(numel, dtype=dtype)
            for x in everyone:
                total += x[mine]
            x = everyone[rank].clone()
            dist.reduce_scatter_tensor(x[mine], x)
            assert torch.equal(x[mine], total), (dtype, numel)
            x[mine] = everyone[rank][mine]
            assert torch.equal(x, everyone[rank]), "other shards have changed"
            dist.all_gather_into_tensor(x, x[mine])
            gathered = torch.cat([everyone[r][r * numel : (r + 1) * numel] for r in range(world_size)])
            assert torch.equal(x, gathered)
            buffers = [everyone[rank].clone() for _ in range(3)]
            with dist._coalescing_manager():
                for buffer in buffers:
                    dist.reduce_scatter_tensor(buffer[mine], buffer)
            assert all(torch.equal(buffer[mine], total) for buffer in buffers)


def lists_in_place(rank, world_size):
    """Lists are copied before and after, so an input may be anywhere in the outputs."""
    numel = 5000
    everyone = [values(r, world_size, world_size * numel) for r in range(world_size)]
    shard = [x.chunk(world_size) for x in everyone]
    parts = list(everyone[rank].clone().chunk(world_size))
    dist.reduce_scatter(parts[0], parts)
    assert torch.equal(parts[0], sum(shard[r][rank] for r in range(world_size)))
    for place in range(world_size):
        parts = [torch.zeros(numel) for _ in range(world_size)]
        parts[place].copy_(shard[rank][rank])
        dist.all_gather(parts, parts[place])
        assert all(torch.equal(parts[r], shard[r][r]) for r in range(world_size))
        parts[place].copy_(shard[rank][rank])
        dist.gather(parts[place], parts if rank == 0 else None, dst=0)
        assert rank != 0 or all(torch.equal(parts[r], shard[r][r]) for r in range(world_size))
    parts = list(everyone[rank].clone().chunk(world_size))
    dist.all_to_all(parts, parts)
    assert all(torch.equal(parts[r], shard[r][rank]) for r in range(world_size))
    parts = list(everyone[rank].clone().chunk(world_size))
    dist.scatter(parts[1], parts if rank == 0 else None, src=0)
    assert torch.equal(parts[1], shard[0][rank])
    columns = torch.zeros(numel, world_size)  # interleaved, and share nothing
    dist.all_gather(list(columns.unbind(1)), shard[rank][rank])
    assert all(torch.equal(columns[:, r], shard[r][r]) for r in range(world_size))


def refused(rank, world_size):
    n, x = world_size, torch.ones(4)
    b = torch.arange(4.0 * n)
    sent = dist.group.WORLD.group.bytes_sent
    fake_mode = FakeTensorMode()
    with fake_mode:
        fake = torch.ones(4)
    views = list(torch.zeros(4 * n - n + 1).unfold(0, 4, 3))
    for call, message in [
        (lambda: dist.all_gather_into_tensor(b, b[1:5]), "input .4 elements. begins 1 element after.*overlaps it"),
        (lambda: dist.reduce_scatter_tensor(b[1:5], b), "output .4 elements. begins 1 element after.*overlaps it"),
        (lambda: dist.all_to_all_single(b, b), "no all_to_all in place"),
        (lambda: dist.all_gather([x] * n, torch.ones(4)), "tensor_list has tensors that share memory"),
        (lambda: dist.all_gather(views, torch.ones(4)), "tensor_list has tensors that share memory"),
        (lambda: dist.gather(x, [x[:]] * n, dst=rank), "gather_list has tensors that share memory"),
        (lambda: dist.all_to_all([x[:2]] * n, [x] * n), "output_tensor_list has tensors that share memory"),
        (lambda: dist.all_gather([torch.ones(1).expand(4) for _ in range(n)], x), "overlaps itself"),
        (lambda: dist.all_reduce_coalesced([x, x[1:]]), "tensors has tensors that share memory"),
        (lambda: coalesced(dist.all_gather_into_tensor, [(b, x), (torch.ones(n), b[:1])]), "share memory"),
        (lambda: coalesced(dist.reduce_scatter_tensor, [(b[:4], torch.ones(4 * n)), (b[3:7], b)]), "share memory"),
        (lambda: dist.all_gather([fake] * n, x), "one of tensor_list is a FakeTensor"),
        (lambda: dist.all_reduce(fake), "tensor is a FakeTensor"),
        (lambda: dist.group.WORLD.scatter([fake], [[fake] * n] if rank == 0 else []), "FakeTensor"),
    ]:
        with pytest.raises(bagua.InvalidArgument, match=message):
            call()
    assert dist.group.WORLD.group.bytes_sent == sent
    dist.barrier()
    spread = distribute_tensor(torch.ones(n), init_device_mesh("cpu", (n,)), [Shard(0)])
    dist.barrier()
    sent = dist.group.WORLD.group.bytes_sent
    for call in (
        lambda: dist.group.WORLD.allreduce([spread]),
        lambda: dist.group.WORLD.broadcast([spread]),
        lambda: bagua.all_reduce(spread),
        lambda: bagua.all_gather(torch.ones(n * n), torch.nn.Parameter(spread)),
    ):
        with pytest.raises(bagua.InvalidArgument, match=r"is a DTensor, which stands .*the local part, \.to_local"):
            call()
    assert dist.group.WORLD.group.bytes_sent == sent
    bagua.all_reduce(spread.to_local())
    assert spread.to_local().tolist() == [n]


def coalesced(call, arguments):
    with dist._coalescing_manager():
        for pair in arguments:
            call(*pair)


@pytest.mark.parametrize("program", [in_place, lists_in_place, refused])
def test_four_ranks(pool4, program):
    run(pool4, program)

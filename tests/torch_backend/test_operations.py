"""Properties of all operations: averages of integers, and groups that torch.compile does not trace."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import bagua
from tests.torch_backend.programs import compare, needs_torch, run

pytestmark = needs_torch

INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def contribution(rank, dtype, numel=24):
    """Small enough for any sum of four; of both signs where the type has two, and no multiples of the ranks."""
    values = [(7 * i + 5 * rank) % 23 - (0 if dtype is torch.uint8 else 11) for i in range(numel)]
    return torch.tensor(values, dtype=dtype)


def averages(rank, world_size):
    for dtype in INTEGERS:
        inputs = [contribution(r, dtype).tolist() for r in range(world_size)]
        # int() rounds towards zero, as NCCL's division of integers does.
        expected = torch.tensor([int(sum(column) / world_size) for column in zip(*inputs, strict=True)], dtype=dtype)
        x = contribution(rank, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert torch.equal(x, expected)
        strided = torch.zeros(24, 2, dtype=dtype)
        strided[:, 1] = contribution(rank, dtype)
        work = dist.all_reduce(strided[:, 1], dist.ReduceOp.AVG, async_op=True)
        assert torch.equal(work.get_future().wait()[0], expected) and work.wait()  # divided once
        assert torch.equal(strided[:, 1], expected) and not strided[:, 0].any()
        mine = contribution(rank, dtype)
        dist.reduce(mine, 1, dist.ReduceOp.AVG)
        assert rank != 1 or torch.equal(mine, expected)
        share = torch.empty(24 // world_size, dtype=dtype)
        dist.reduce_scatter_tensor(share, contribution(rank, dtype), dist.ReduceOp.AVG)
        assert torch.equal(share, expected.chunk(world_size)[rank])
    is_set = torch.tensor([False, rank == 1, True])
    dist.all_reduce(is_set)  # as over NCCL: whether any is
    assert is_set.tolist() == [False, True, True]
    share = torch.empty(1, dtype=torch.bool)
    dist.reduce_scatter_tensor(share, (torch.arange(world_size) == 0) & (rank == 1))
    assert share.item() == (rank == 0)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    values = DTensor.from_local(torch.tensor([0.0, float(rank == 1)]), mesh, [Shard(0)])
    assert values.any().full_tensor().item() and not (values > 1).any().full_tensor().item()
    with pytest.raises(bagua.InvalidArgument, match="AVG has no meaning for torch.bool"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow("test_averages_of_integers"))])
def test_averages_of_integers(num_ranks, pool2, pool4):
    run(pool2 if num_ranks == 2 else pool4, averages)


def compiled(rank, world_size, backend, options):
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = torch.compile(DistributedDataParallel(model, **options), backend=backend)
    for step in range(2):
        model(torch.sin(torch.arange(64.0).view(4, 16) + rank + step)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_compiled_ddp(pool2):
    compare(pool2, compiled, "eager", {})


@pytest.mark.slow("test_a_compiled_ddp")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=repr)
def test_a_compiled_ddp_with_options(pool2, options):
    compare(pool2, compiled, "aot_eager", options)


def compiled_collectives(rank, world_size, backend):
    group = dist.group.WORLD

    def step(x):
        total = functional.all_reduce(x, "sum", group)
        every = functional.all_gather_tensor(x * 2, 0, group)
        share = functional.reduce_scatter_tensor(every, "sum", 0, group)
        in_place = x * 3
        dist.all_reduce(in_place)
        return total + 1, every + 1, share + 1, in_place + 1

    def in_pieces(x):  # torch.compile breaks its graph at the handle
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.barrier()
        return x + 1

    torch._dynamo.reset()
    x = torch.arange(4.0) + rank
    found = [step(x), torch.compile(step, backend=backend, fullgraph=True)(x)]
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    return found[1], torch.compile(in_pieces, backend=backend)(x.clone())


@pytest.mark.slow("test_functional_collectives")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_collectives(pool2):
    compare(pool2, compiled_collectives, "aot_eager")

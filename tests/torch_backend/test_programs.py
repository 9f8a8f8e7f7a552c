"""Programs written for torch.distributed run unchanged: DDP, FSDP2, DTensor, DeviceMesh, DCP, objects; 2 and 4 ranks.

Each runs on gloo and on bagua in the same processes; what every rank ends with must be the same.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bagua
from tests.distributed.worlds import SAME_TEST
from tests.torch_backend.programs import compare, needs_torch, on_both, run, values

pytestmark = needs_torch


@pytest.fixture(params=[2, pytest.param(4, marks=SAME_TEST)])
def pool(request, pool2, pool4):
    return pool2 if request.param == 2 else pool4


def make_model():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    )


def train(model, rank, world_size, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.sin(values(rank, world_size, 8 * 16).view(8, 16) + step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def ddp(rank, world_size):
    # A small bucket, so that there are several; the model of rank 0 goes to the others.
    model = make_model()
    for parameter in model.parameters():
        parameter.data += rank
    plain = train(DistributedDataParallel(model, bucket_cap_mb=0.002), rank, world_size)
    with plain.no_sync():
        plain(torch.ones(2, 16)).sum().backward()
    return plain.state_dict()


def test_ddp(pool):
    states = compare(pool, ddp)
    for state in states[1:]:
        for name, tensor in state.items():
            if "running" not in name and "tracked" not in name:
                assert torch.equal(tensor, states[0][name])


def ddp_with_a_hook(rank, world_size):
    """The hook's steps run behind the future of each all-reduce."""
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return [parameter.detach() for parameter in train(model, rank, world_size).parameters()]


def test_ddp_with_a_communication_hook(pool):
    compare(pool, ddp_with_a_hook, rtol=1e-2, atol=1e-4)  # sums in float16 are rounded in different orders


def ddp_with_a_builtin_hook(rank, world_size, name):
    model = DistributedDataParallel(make_model())
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    with pytest.raises(RuntimeError, match="hook"):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))  # there is one already
    return [parameter.detach() for parameter in train(model, rank, world_size).parameters()]


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_ddp_with_a_builtin_hook(pool2, name):
    compare(pool2, ddp_with_a_builtin_hook, name, rtol=1e-2, atol=1e-4)


def sparse_gradients(rank, world_size):
    model = DistributedDataParallel(torch.nn.Embedding(6, 2, sparse=True))
    loss = model(torch.tensor([rank, 3])).sum()
    with pytest.raises(bagua.InvalidArgument, match=r"layout torch\.sparse_coo; .*DDP.*sparse=False"):
        loss.backward()


def test_ddp_with_sparse_gradients_says_what_to_do(pool2):
    run(pool2, sparse_gradients)


def fsdp(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh), rank, world_size)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def test_fully_shard(pool):
    states = compare(pool, fsdp)
    assert all(torch.equal(state["0.weight"], states[0]["0.weight"]) for state in states)


def hybrid(rank, world_size):
    """Two dimensions: replicas of shards, so that overlapping sub-groups work side by side."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(16, 6)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    train(fully_shard(model, mesh=mesh), rank, world_size)
    return [p.full_tensor().detach() for p in model.parameters()], mesh["shard"].get_group().size()


def test_hybrid_sharding(pool4):
    compare(pool4, hybrid)


def dtensor(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    whole = torch.randn(4 * world_size + 1, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = torch.mm(columns, DTensor.from_local(torch.ones(6, 3), mesh, [Replicate()]))
    block = torch.nn.Sequential(torch.nn.Linear(8, 4 * world_size), torch.nn.ReLU(), torch.nn.Linear(4 * world_size, 8))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = block(torch.ones(2, 8))
    out.sum().backward()
    return [rows.full_tensor(), columns.full_tensor(), product.full_tensor(), rows.sum().full_tensor(), out.detach(),
            block[0].weight.grad.full_tensor()]  # fmt: skip


def test_dtensor(pool):
    compare(pool, dtensor)


def functionals(rank, world_size):
    group, x = dist.group.WORLD, values(rank, world_size, 4 * world_size)
    pairs = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    return [
        functional.all_reduce(x, "max", group) + 0,
        functional.all_gather_tensor(x, 0, group) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        functional.all_to_all_single(x, None, None, group) + 0,
        functional.broadcast(x, 1, group) + 0,
        *[pair + 0 for pair in pairs],
        functional.permute_tensor(x, [(r + 1) % world_size for r in range(world_size)], group) + 0,
    ]


def test_functional_collectives(pool):
    compare(pool, functionals)


def functional_graph(rank, world_size):
    """The results are dropped, or waited for much later than they were asked for."""
    group = dist.group.WORLD
    outs = [functional.all_reduce(values(rank, world_size, 100) + i, "sum", group) for i in range(20)]
    del outs[::2]
    for i, out in zip(range(1, 20, 2), outs, strict=True):
        assert torch.equal(out + 0, sum(values(r, world_size, 100) + i for r in range(world_size)))


def test_functional_collectives_outlive_their_python_handles(pool2):
    run(pool2, functional_graph)


def objects(rank, world_size):
    mine = {"rank": rank, "payload": "x" * (1000 * rank), "tensor": values(rank, world_size, 3)}
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)
    pair = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(pair, src=1)
    share = [None]
    dist.scatter_object_list(share, [f"for {r}" * (r + 1) for r in range(world_size)] if rank == 0 else None, src=0)
    gathered = [None] * world_size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    return [repr(found) for found in (everyone, pair, share, gathered)]


def test_objects(pool):
    results = pool.run(on_both, args=(objects, ()))
    assert all(result["bagua"] == result["gloo"] for result in results)
    assert "'rank': 1" in results[0]["bagua"][0]


def checkpoint(rank, world_size, folder):
    backend = dist.get_backend()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    state = {
        "sharded": distribute_tensor(torch.randn(4 * world_size, 3), mesh, [Shard(0)]),
        "half": distribute_tensor(torch.randn(8, 4).half(), mesh, [Replicate()]),
        "plain": torch.arange(5),
        "step": 7,
    }
    dcp.save(state, checkpoint_id=f"{folder}/{backend}")
    loaded = {
        "sharded": distribute_tensor(torch.zeros(4 * world_size, 3), mesh, [Shard(0)]),
        "half": distribute_tensor(torch.zeros(8, 4).half(), mesh, [Shard(0)]),
        "plain": torch.zeros(5, dtype=torch.int64),
        "step": 0,
    }
    dcp.load(loaded, checkpoint_id=f"{folder}/{backend}")
    assert loaded["step"] == 7 and torch.equal(loaded["plain"], torch.arange(5))
    assert torch.equal(loaded["sharded"].full_tensor(), state["sharded"].full_tensor())
    return loaded["sharded"].to_local(), loaded["half"].to_local()


def test_checkpoint(pool, tmp_path):
    compare(pool, checkpoint, str(tmp_path))


def sharded_states(rank, world_size):
    """A wrapped model steps by an optimizer whose states are spread over the ranks as by one that has all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import takes long, and is for this test only

    trained = []
    for is_sharded in (False, True):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        bagua.with_bagua(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).pow(2).mean().backward()
            optimizer.step()
            if step == 1:
                bagua.with_bagua(model, optimizer, algorithm="gradient_allreduce")  # its momentum stays where it is
        model.bagua.remove()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, sharded in zip(*trained, strict=True):
        torch.testing.assert_close(sharded, plain)


def test_a_wrapped_model_with_sharded_states(pool2):
    run(pool2, sharded_states)

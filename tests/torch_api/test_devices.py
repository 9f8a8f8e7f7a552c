"""Programs for the original project with tensors and models on a device: as on the CPU, to the bit where nothing but
bagua computes, and where the device is emulated."""

import pytest
import torch
import torch.distributed as dist

import bagua
import bagua.torch_api as api
from bagua.torch_api import communication
from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from bagua.torch_api.data_parallel import DistributedDataParallel, functional
from tests import accelerator
from tests.conformance.training import slow_but
from tests.torch_api.programs import original_process_group


def started(rank, world_size, program, args):
    accelerator.use_device_of(api.get_local_rank())  # as programs do, before init_process_group
    with original_process_group():
        return program(rank, world_size, *args)


def run(pool, program, *args):
    return pool.run(started, args=(program, args))


def on_both(rank, n, program, *args):
    """Runs `program(rank, n, device, *args)` on the CPU and on the device: the tensors it returns, in this order."""
    device = accelerator.device_of(rank)
    expected = program(rank, n, torch.device("cpu"), *args)
    found = program(rank, n, device, *args)
    assert len(found) == len(expected) > 0
    assert {ours.device for ours in found} == {device}
    return expected, found


def same_bits(rank, n, program):
    for index, (cpus, ours) in enumerate(zip(*on_both(rank, n, program), strict=True)):
        assert torch.equal(ours.cpu(), cpus), (index, ours.cpu(), cpus)


def trains_alike(rank, n, program, name):
    expected, found = on_both(rank, n, program, name)
    assert accelerator.agree(found, expected)


def collectives(rank, n, device):
    """Each ends before it returns: a stream that has waited for nothing finds the result."""
    x = torch.arange(4.0 * n).mul(rank + 1).to(device)
    results = []

    def keep(*tensors):
        if device.type == "cpu":
            results.extend(tensor.clone() for tensor in tensors)
            return
        with torch.Stream(device) as stream:
            results.extend(tensor.clone() for tensor in tensors)
        stream.synchronize()

    def out(numel=4 * n):
        return torch.zeros(numel, device=device)

    y = out()
    api.allreduce(x, y)
    keep(y)
    y = x.clone()
    api.allreduce_inplace(y, api.ReduceOp.AVG)
    keep(y)
    y = out()
    api.reduce(x, y, 1)
    keep(y)
    y = x.clone()
    api.broadcast(y, 1)
    keep(y)
    y = out(4 * n * n)
    api.allgather(x, y)
    keep(y)
    y = x.clone()
    api.allgather_inplace(y)
    keep(y)
    y = out(4 * n * n) if rank == 0 else out(0)
    api.gather(x, y, 0)
    keep(y)
    y = out(4)
    api.scatter(x, y, 1)
    keep(y)
    y = out(4)
    api.reduce_scatter(x, y)
    keep(y)
    y = x.clone()
    api.reduce_scatter_inplace(y)
    keep(y)
    y = out()
    api.alltoall(x, y)
    keep(y)
    y = out()  # each rank sends 3 to rank 0 and 2 to rank 1
    api.alltoall_v(x, [3, 2], [0, 4], y, [3, 3] if rank == 0 else [2, 2], [1, 4])
    keep(y)
    y = out()
    if rank == 0:
        api.send(x, 1)
    else:
        api.recv(y, 0)
    keep(y)
    pair = [x.clone(), x + 1]
    communication.allreduce_coalesced_inplace(pair)
    communication.broadcast_coalesced(pair, 1)
    keep(*pair)
    z = x.clone().requires_grad_()
    functional.all_reduce(z * z).sum().backward()
    results.append(z.grad)  # backward goes on with it on its own stream, the current one
    api.barrier()
    assert api.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    y = x.clone()
    dist.all_reduce(y)  # torch.distributed, too
    return [*results, y]


def test_collectives(pair_on_devices):
    run(pair_on_devices, same_bits, collectives)


ALGORITHMS = {
    "gradient_allreduce": lambda optimizer: gradient_allreduce.GradientAllReduceAlgorithm(),
    "bytegrad": lambda optimizer: bytegrad.ByteGradAlgorithm(hierarchical=False),
    "decentralized": lambda optimizer: decentralized.DecentralizedAlgorithm(hierarchical=False),
    "low_precision_decentralized": lambda optimizer: decentralized.LowPrecisionDecentralizedAlgorithm(
        hierarchical=False
    ),
    "qadam": lambda optimizer: q_adam.QAdamAlgorithm(optimizer, hierarchical=False),
}


def training(rank, n, device, name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1)).to(device)
    if name == "qadam":
        optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=3)
        optimizer.param_groups[0]["fused"] = True  # as it is on a device by default
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model = model.with_bagua([optimizer], ALGORITHMS[name](optimizer))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
        optimizer.zero_grad()
        (model(x.to(device)) - y.to(device)).square().mean().backward()
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    model.bagua.remove()
    return weights


@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "bytegrad", "decentralized"))
def test_training(pair_on_devices, name):
    run(pair_on_devices, trains_alike, training, name)


def averaging(rank, n):
    """Averages in the background while the device trains, until it is told to end."""
    model = torch.nn.Linear(4, 1).to(accelerator.kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=5)
    model = model.with_bagua([optimizer], algorithm)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + 1.0, device=accelerator.kind())).sum().backward()
        optimizer.step()
    algorithm.abort(model)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert weights.isfinite().all()
    model.bagua.remove()


def test_averaging_in_the_background(pair_on_devices):
    run(pair_on_devices, averaging)


def wrapping(rank, n):
    here = accelerator.device_of(rank)
    own = here.index
    for options in ({}, {"device_ids": [own]}, {"device_ids": [own], "output_device": own}, {"output_device": here}):
        model = torch.nn.Linear(4, 1).to(here)
        wrapped = DistributedDataParallel(model, **options)
        wrapped(torch.ones(2, 4, device=here)).sum().backward()
        assert model.weight.grad.tolist() == [[2.0] * 4] and model.weight.grad.device == here
        model.bagua.remove()
    for options in ({"device_ids": [own + 2]}, {"output_device": own + 2}):
        with pytest.raises(bagua.InvalidArgument, match="device"):
            DistributedDataParallel(torch.nn.Linear(4, 1).to(here), **options)


def test_the_devices_that_torchs_class_takes(pair_on_devices):
    run(pair_on_devices, wrapping)


def refusals(rank, n):
    here = torch.ones(4, device=accelerator.device_of(rank))
    kind = here.device.type
    calls = {
        f"send_tensor is on {kind}:.*, but recv_tensor is on cpu": lambda: api.allreduce(here, torch.ones(4)),
        f"input is on {kind}:.*, but output is on cpu": lambda: api.alltoall(here, torch.ones(4)),
        "stream of bagua": lambda: api.new_group(stream=torch.Stream(here.device)),
    }
    for message, call in calls.items():
        with pytest.raises(bagua.InvalidArgument, match=message):
            call()
    if not torch.cuda.is_available():  # what programs have is torch's own, and says so
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            torch.ones(1).cuda()
    api.allreduce_inplace(here)  # nothing was sent
    assert here.tolist() == [2.0] * 4


def test_what_cannot_be_done_is_refused(pair_on_devices):
    run(pair_on_devices, refusals)

"""torch.distributed over bagua with tensors of a device.

Collectives give the CPU's bits on the device, and so does training on the emulated device. wait() and futures behave as
with torch's backends for devices: the streams wait, the host does not.
"""

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bagua
import tests.emulated_device as emulated
from bagua.testing import Pool
from tests import accelerator
from tests.distributed.worlds import fast_in, in_turns
from tests.meeting import wait_until
from tests.torch_backend.programs import TIMEOUT, needs_torch, values

pytestmark = needs_torch


def started(rank, world_size, program, args):
    accelerator.use_device_of(rank)
    dist.init_process_group(f"cpu:bagua,{accelerator.kind()}:bagua", timeout=TIMEOUT)
    try:
        return program(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def run(pool, program, *args, **options):
    return pool.run(started, args=(program, args), **options)


def on_both(rank, world_size, program):
    """Runs `program(rank, world_size, device)` on the CPU and on the device: the tensors, in this order."""
    device = accelerator.device_of(rank)
    expected = program(rank, world_size, torch.device("cpu"))
    found = program(rank, world_size, device)
    assert len(found) == len(expected) > 0
    assert {ours.device for ours in found} == {device}
    return expected, found


def same_bits(rank, world_size, program):
    for index, (cpus, ours) in enumerate(zip(*on_both(rank, world_size, program), strict=True)):
        bits = [x.contiguous().view(torch.uint8) if x.is_floating_point() else x for x in (ours.cpu(), cpus)]
        assert ours.dtype == cpus.dtype and torch.equal(*bits), (index, ours.cpu(), cpus)


# ---- every collective


def reductions(rank, n, device):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        x = (values(rank, n, 33) / 7).to(dtype).to(device)
        y, parts = x.clone(), [x * (part + 1) for part in range(n)]
        dist.all_reduce(x)
        dist.reduce(y, dst=1)
        out, single = torch.empty_like(x), torch.empty_like(x)
        dist.reduce_scatter(out, parts)
        dist.reduce_scatter_tensor(single, torch.cat(parts))
        found += [x, out, single, *([y] if rank == 1 else [])]
    mean = values(rank, n, 33, torch.int64).to(device)
    dist.all_reduce(mean, dist.ReduceOp.AVG)  # divided on the device, behind the sum
    strided = values(rank, n, 64).to(device)
    dist.all_reduce(strided.view(8, 8)[:, 1:3])
    z = torch.complex(values(rank, n, 9), values(rank, n, 9) + 1).to(device)
    dist.all_reduce(z)
    return [*found, mean, strided, z]


def movements(rank, n, device):
    found = []
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex128):
        mine = values(rank, n, 6, dtype).view(2, 3).to(device)
        x = mine.clone()
        dist.broadcast(x, src=1)
        gathered = [torch.zeros_like(mine) for _ in range(n)]
        dist.all_gather(gathered, mine)
        single = torch.zeros(2 * n, 3, dtype=dtype, device=device)
        dist.all_gather_into_tensor(single, mine)
        at_root = [torch.zeros_like(mine) for _ in range(n)] if rank == 1 else None
        dist.gather(mine, at_root, dst=1)
        scattered = torch.zeros_like(mine)
        dist.scatter(scattered, [mine + part if dtype is not torch.bool else ~mine for part in range(n)]
                     if rank == 0 else None, src=0)  # fmt: skip
        swapped = [torch.zeros_like(mine) for _ in range(n)]
        dist.all_to_all(swapped, [mine.flip(0), mine])
        exchanged = torch.zeros_like(mine)
        dist.all_to_all_single(exchanged, mine)
        other = torch.zeros_like(mine)
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        )
        for request in requests:
            request.wait()
        found += [x, *gathered, single, *(at_root or []), scattered, *swapped, exchanged, other]
    return found


def coalesced(rank, n, device):
    tensors = [values(rank, n, 5 + i).to(device) for i in range(3)]
    blocks = [torch.zeros(2 * x.numel(), device=device) for x in tensors]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    with dist._coalescing_manager(async_ops=True) as manager:
        for block, x in zip(blocks, tensors, strict=True):
            dist.all_gather_into_tensor(block, x + rank)
    manager.wait()
    return [*tensors, *blocks]


def functionals(rank, n, device):
    x = values(rank, n, 4 * n).to(device)
    pair = functional.all_reduce_coalesced([x, x + 1], "sum", dist.group.WORLD)
    return [
        functional.all_reduce(x, "max", dist.group.WORLD) + 0,
        functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
        functional.all_to_all_single(x, None, None, dist.group.WORLD) + 0,
        *(one + 0 for one in pair),
    ]


@pytest.mark.parametrize("program", [reductions, movements, coalesced, functionals])
def test_collectives_have_the_cpus_bits(pair_on_devices, program):
    run(pair_on_devices, same_bits, program)


# ---- streams and the host


def waits(rank, n):
    """wait() returns while the device is still computing the outcome, which work enqueued next uses."""
    device, were_busy = accelerator.device_of(rank), []
    with accelerator.delayed(0.005):
        for turn in range(12):
            x = torch.full((1000,), rank + turn + 1.0, device=device)
            x.mul_(2)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            were_busy.append(not work.is_completed())
            y = x + 1
            assert y.eq(2 * sum(r + turn + 1 for r in range(n)) + 1).all(), turn
            wait_until(work.is_completed, "the device comes to the end of an all_reduce")
            assert work.is_success() and work.result()[0] is x
    assert any(were_busy)


def test_wait_blocks_the_stream_not_the_host(pair_on_devices):
    run(pair_on_devices, waits)


def other_stream(rank, n):
    """The stream that is current at wait() waits, not the one of the call."""
    side = torch.Stream(accelerator.device_of(rank))
    for turn in range(10):
        x = torch.full((5000,), rank + turn + 0.5, device=accelerator.kind())
        gathered = [torch.empty_like(x) for _ in range(n)]
        work = dist.all_gather(gathered, x, async_op=True)
        with side:
            work.wait()
            found = torch.stack(gathered)
        side.synchronize()
        assert found.cpu().eq(torch.tensor([r + turn + 0.5 for r in range(n)]).view(n, 1)).all()


def test_another_stream_may_wait(pair_on_devices):
    run(pair_on_devices, other_stream)


def started_alike(rank, n, kind, turn):
    """An operation whose outcome is copied to where it belongs behind its end, its tensors, and their values then."""
    device = accelerator.device_of(rank)
    total = sum(r + turn + 1 for r in range(n))
    if kind == "all_gather":
        into = [torch.zeros(1000, device=device) for _ in range(n)]
        work = dist.all_gather(into, torch.full((1000,), rank + turn + 1.0, device=device), async_op=True)
        return work, into, [r + turn + 1.0 for r in range(n)]
    if kind == "all_to_all":
        into = [torch.zeros(1000, device=device) for _ in range(n)]
        sources = [torch.full((1000,), 10.0 * rank + r + turn, device=device) for r in range(n)]
        return dist.all_to_all(into, sources, async_op=True), into, [10.0 * r + rank + turn for r in range(n)]
    into = torch.full((1000,), rank + turn + 1, device=device)
    return dist.all_reduce(into, dist.ReduceOp.AVG, async_op=True), [into], [total // n]


COPIED_BEHIND = ("all_gather", "all_to_all", "all_reduce of integers")


def dropped(rank, n):
    """Futures, Works and tensors, while their operations are under way."""
    emulated.set_delay(0.01)
    try:
        for turn in range(30):
            for kind in COPIED_BEHIND:
                started_alike(rank, n, kind, turn)[0].get_future()
            if turn % 10 == 9:
                dist.barrier()
        time.sleep(0.3)
    finally:
        emulated.set_delay(emulated.DEFAULT_DELAY)
    torch.accelerator.synchronize()  # raises what the device has found


def test_outcomes_live_until_they_are_copied(pair_on_emulated):
    run(pair_on_emulated, dropped)


def seen_elsewhere(rank, n):
    """Every stream can use the result of a completed Work."""
    side = torch.Stream(accelerator.device_of(rank))
    with accelerator.delayed(0.01):
        for turn in range(8):
            for kind in COPIED_BEHIND:
                work, into, expected = started_alike(rank, n, kind, turn)
                wait_until(work.is_success, f"{kind} has ended well")
                with side:
                    found = torch.stack(into)
                side.synchronize()
                assert found.cpu().eq(torch.tensor(expected).view(-1, 1)).all(), (kind, turn)
                torch.accelerator.synchronize()


def test_what_has_completed_is_there_for_every_stream(pair_on_emulated):
    run(pair_on_emulated, seen_elsewhere)


def futures(rank, n):
    device = accelerator.device_of(rank)
    x = torch.full((500,), rank + 1.0, device=device)
    streams = []

    def twice(future):
        streams.append(torch.accelerator.current_stream(device))
        assert torch.accelerator.current_device_index() == device.index
        y = future.value()[0] * 2
        dist.all_reduce(y)  # a callback may start another
        return y

    future = dist.all_reduce(x, async_op=True).get_future()
    behind = future.then(twice)
    assert behind.wait().eq(2 * n * 3).all() and future.wait()[0] is x
    assert future.value()[0].eq(3).all()
    assert streams == [streams[0]] and streams[0] != torch.accelerator.current_stream(device)  # one of its own
    called = []
    late = dist.all_reduce(x, async_op=True)
    late.wait()
    late.get_future().add_done_callback(lambda f: called.append(f.value()[0].sum().item()))
    dist.barrier()
    late.get_future().then(lambda f: None).wait()  # runs behind the other one
    assert called == [500 * 6.0]
    failing = dist.all_reduce(x, async_op=True).get_future().then(lambda f: 1 // 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failing.wait()
    both = [dist.all_reduce(torch.full((9,), rank + i, device=device), async_op=True).get_future() for i in (0, 1)]
    # torch's future of futures knows no device, so what its callback returns has to be there.
    total = torch.futures.collect_all(both).then(lambda f: sum(one.wait()[0] for one in f.value()).tolist())
    assert total.wait() == [4] * 9


def test_futures_of_devices(pair_on_devices):
    run(pair_on_devices, futures)


def future_while_busy(rank, n):
    """A future is there as soon as its operation has been enqueued."""
    were_busy = []
    with accelerator.delayed(0.004):
        for turn in range(12):
            x = torch.full((100,), rank + turn + 0.0, device=accelerator.kind())
            work = dist.all_reduce(x, async_op=True)
            (found,) = work.get_future().wait()
            were_busy.append(not work.is_completed())
            assert (found * 2).eq(2 * sum(r + turn for r in range(n))).all()
    assert any(were_busy)


def test_a_future_does_not_wait_for_the_device(pair_on_devices):
    run(pair_on_devices, future_while_busy)


def futures_after_wait(rank, n):
    """After wait() a future has its value, while the device is still busy with it: what is enqueued next finds it."""
    were_busy = []
    with accelerator.delayed(0.005):
        for turn in range(12):
            x = torch.full((100,), rank + turn + 0.0, device=accelerator.kind())
            work = dist.all_reduce(x, async_op=True)
            future = work.get_future() if turn % 2 else None
            work.wait()
            future = work.get_future() if future is None else future
            assert future.done()
            (found,) = future.value()
            were_busy.append(not work.is_completed())
            assert (found * 2).eq(2 * sum(r + turn for r in range(n))).all()
    assert any(were_busy[::2]) and any(were_busy[1::2])


def test_after_wait_a_future_has_its_value(pair_on_devices):
    run(pair_on_devices, futures_after_wait)


def deadlines(rank, n):
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:  # alone
        work = dist.all_reduce(torch.ones(4, device=accelerator.kind()), group=group, async_op=True)
        with pytest.raises(RuntimeError, match="rank 1"):
            work.get_future().wait()
        with pytest.raises(bagua.DeadlineExceeded, match="rank 1"):
            work.wait()
        assert not work.is_success() and isinstance(work.exception(), bagua.DeadlineExceeded)
    dist.barrier()


def test_a_missing_rank_is_named(pair_on_devices):
    run(pair_on_devices, deadlines)


def barriers(rank, n):
    with accelerator.delayed(0.02):
        for _ in range(5):
            x = torch.ones(100, device=accelerator.kind()) * 2
            event = torch.Event(device=accelerator.kind())
            event.record()
            dist.barrier(device_ids=[accelerator.device_of(rank).index])
            assert event.query() and x.sum().item() == 200
    dist.barrier()
    dist.barrier(async_op=True).wait()


def test_a_barrier_with_a_device_waits_for_it(pair_on_devices):
    run(pair_on_devices, barriers)


# ---- what torch asks of a group


def objects(rank, n):
    assert dist.distributed_c10d._device_capability() == ["cpu", accelerator.kind()]
    torch.accelerator.synchronize()
    if accelerator.is_emulated():
        emulated.reset_counters()
    mine = [{"rank": rank} if rank == 1 else None]
    dist.broadcast_object_list(mine, src=1)
    everyone = [None] * n
    dist.all_gather_object(everyone, rank)
    assert mine == [{"rank": 1}] and everyone == list(range(n))
    if accelerator.is_emulated():
        counts = emulated.counters()
        assert counts["bytes_to_device"] == counts["bytes_to_host"] == 0  # as tensors of the CPU
    at_device = accelerator.device_of(rank)
    assert dist.group.WORLD._get_backend(at_device) is dist.group.WORLD
    assert not dist.group.WORLD.supports_tensor_alloc(at_device)
    other_kind = "cuda" if accelerator.is_emulated() else "xpu"
    with pytest.raises(RuntimeError, match=other_kind):
        dist.group.WORLD._get_backend(torch.device(other_kind))


def test_objects_go_over_the_cpu(pair_on_devices):
    run(pair_on_devices, objects)


def subgroups(rank, n):
    device = accelerator.device_of(rank)
    group = dist.new_group([1, 0])
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x, group=group)
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(x, group=alone)
    assert x.tolist() == [3.0] * 3


def test_subgroups(pair_on_devices):
    run(pair_on_devices, subgroups)


def other_specs(rank, n, spec, with_device_id):
    device_id = accelerator.use_device_of(rank)
    options = {"device_id": device_id} if with_device_id else {}
    dist.init_process_group(spec.format(device=accelerator.kind()), timeout=TIMEOUT, **options)
    for device in ("cpu", accelerator.kind()):
        x = torch.full((3,), rank + 1.0, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
    dist.barrier()
    dist.destroy_process_group()


@in_turns("spec, with_device_id", ["bagua", "{device}:bagua", "cpu:bagua,cuda:bagua"], [False, True])
def test_however_it_is_asked_for(pair_on_devices, spec, with_device_id):
    pair_on_devices.run(other_specs, args=(spec, with_device_id))


def test_it_is_registered_for_cpu_and_cuda():
    assert dist.Backend.backend_capability["bagua"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"  # torch's own default stays


def mixed(rank, n):
    here, there = accelerator.device_of(rank), accelerator.device_of(2 + rank)
    x, cpu = torch.ones(4, device=here), torch.ones(4)
    calls = [
        lambda: dist.all_gather_into_tensor(torch.empty(8), x),
        lambda: dist.all_gather([torch.empty(4, device=here), cpu], x),
        lambda: dist.all_gather([cpu, cpu.clone()], x),
        lambda: dist.reduce_scatter(x, [x.clone(), cpu]),
        lambda: dist.all_to_all([torch.empty_like(x), torch.empty(4)], [x, x]),
        lambda: dist.all_to_all_single(torch.empty(4), x),
        lambda: dist.group.WORLD.allreduce_coalesced([x, cpu]),
    ]
    if there != here:
        calls += [
            lambda: dist.reduce_scatter_tensor(x, torch.empty(8, device=there)),
            lambda: dist.all_to_all([torch.empty_like(x), torch.empty_like(x)], [x, torch.ones(4, device=there)]),
        ]
    for call in calls:
        with pytest.raises(
            bagua.InvalidArgument, match=rf"is on .*({here.type}|cpu).*, but .* is on .*one operation works"
        ):
            call()
    with pytest.raises(bagua.InvalidArgument, match="is on meta; bagua communicates"):
        dist.group.WORLD.allreduce_coalesced([torch.empty(2, device="meta"), torch.empty(2, device="meta")])
    shared = torch.ones(8, device=here)
    with pytest.raises(bagua.InvalidArgument, match="share memory"):
        dist.all_gather([shared[:4], shared[2:6]], x)
    dist.all_reduce(x)  # nothing was sent
    assert x.tolist() == [2.0] * 4


def test_tensors_of_several_devices_are_refused(pair_on_devices):
    run(pair_on_devices, mixed)


# ---- programs


def make_model():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    )


def train(model, rank, n, device, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.sin(values(rank, n, 8 * 16).view(8, 16) + step).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def ids_of(device):
    return None if device.type == "cpu" else [device.index]


def ddp(rank, n, device):
    """Several buckets; the model of rank 0 goes to the other, which then has it in every step."""
    model = make_model()
    for parameter in model.parameters():
        parameter.data += rank
    model = DistributedDataParallel(model.to(device), device_ids=ids_of(device), bucket_cap_mb=0.002)
    wrapped = train(model, rank, n, device)
    return [tensor.detach() for tensor in wrapped.state_dict().values()]


def ddp_with_a_hook(rank, n, device):
    model = DistributedDataParallel(make_model().to(device), device_ids=ids_of(device))
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return [parameter.detach() for parameter in train(model, rank, n, device).parameters()]


def uneven(rank, n, device, **options):
    """DDP.join: rank 1 has fewer batches."""
    model = DistributedDataParallel(make_model().to(device), device_ids=ids_of(device))
    with model.join(**options):
        train(model, rank, n, device, steps=4 - rank)
    return [parameter.detach() for parameter in model.parameters()]


def uneven_by_those_that_are_left(rank, n, device):
    """The gradients are divided by the number of ranks that have not joined, which the reducer reads from a future."""
    return uneven(rank, n, device, divide_by_initial_world_size=False)


def trains_alike(rank, world_size, program):
    expected, found = on_both(rank, world_size, program)
    assert accelerator.agree(found, expected)


@fast_in("program", [ddp_with_a_hook, uneven_by_those_that_are_left], [ddp, uneven])
def test_ddp_trains_as_on_the_cpu(pair_on_devices, program):
    run(pair_on_devices, trains_alike, program)


def fsdp(rank, n, device):
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 8)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    train(fully_shard(model, mesh=mesh), rank, n, device)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_fully_shard_trains_as_on_the_cpu(pair_on_devices):
    run(pair_on_devices, trains_alike, fsdp)


def profiled(rank, n):
    x = torch.full((3,), rank + 1.0, device=accelerator.kind())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with accelerator.delayed(0.05):  # the device is busy with it when the profiler stops
                dist.all_reduce(x)
    assert any(event.name == "bagua:all_reduce" for event in profile.events())
    assert x.tolist() == [3.0] * 3


def test_the_profiler_sees_operations_on_devices(pair_on_devices):
    run(pair_on_devices, profiled)


def test_ddp_between_hosts():
    """Processes that share no memory: from the device over TCP."""
    reason = emulated.unavailable()
    if reason is not None:
        pytest.skip(reason)
    emulated.build()
    with Pool(2, nodes=2) as pool:
        pool.run(accelerator.load_in_rank, args=[emulated.NAME])
        run(pool, trains_alike, ddp, env={"BAGUA_SOCKET_IFNAME": "lo"})

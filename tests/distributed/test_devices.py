"""Collectives on tensors of a device: a GPU, or the emulated one, whose kernels run late and whose memory no host may
touch."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import bagua
import tests.emulated_device as emulated
from bagua.distributed import devices
from bagua.testing import world as thread_world
from tests import accelerator
from tests.distributed.worlds import fast_in, shm, tcp, through_torch
from tests.meeting import meet, wait_until

SIZE = 2


def _values(rank, *shape):
    """Small integers, whose sums are exact in any order."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).float()


# ---- results, by the definitions


def check_collectives(group):
    rank, size, device = group.rank, group.size, accelerator.use_device_of(group.rank)
    last = size - 1
    everybody = [_values(r, 3, 700) for r in range(size)]
    mine = everybody[rank].to(device)

    total = mine.clone()
    group.all_reduce(total).wait()
    assert torch.equal(total.cpu(), sum(everybody[1:], everybody[0]))
    total = mine.clone()
    group.reduce(total, last, bagua.ReduceOp.MAX).wait()
    assert rank != last or torch.equal(total.cpu(), torch.stack(everybody).amax(0))
    sent = mine.clone()
    group.broadcast(sent, last).wait()
    assert torch.equal(sent.cpu(), everybody[last])
    gathered = torch.empty(size, 3, 700, device=device)
    group.all_gather(gathered, mine).wait()
    assert torch.equal(gathered.cpu(), torch.stack(everybody))
    gathered = torch.empty(size, 3, 700, device=device) if rank == 0 else None
    group.gather(gathered, mine, 0).wait()
    assert rank != 0 or torch.equal(gathered.cpu(), torch.stack(everybody))
    part = torch.empty(3, 700, device=device)
    group.scatter(part, torch.stack(everybody).to(device) if rank == 0 else None, 0).wait()
    assert torch.equal(part.cpu(), everybody[rank])
    group.reduce_scatter(part, torch.cat([mine + r for r in range(size)]), bagua.ReduceOp.AVG).wait()
    expected = sum(((values + rank) for values in everybody[1:]), everybody[0] + rank) / size
    torch.testing.assert_close(part.cpu(), expected)
    swapped = torch.empty(size, 3, 700, device=device)
    group.all_to_all(swapped, torch.stack([mine + r for r in range(size)])).wait()
    assert torch.equal(swapped.cpu(), torch.stack([values + rank for values in everybody]))
    near = mine.clone()
    group.neighbor_average(near, "all").wait()
    torch.testing.assert_close(near.cpu(), sum(everybody[1:], everybody[0]) / size)
    if rank == 0 and size > 1:
        group.send(mine, 1).wait()
    elif rank == 1:
        received = torch.empty(3, 700, device=device)
        group.recv(received, 0).wait()
        assert torch.equal(received.cpu(), everybody[0])
    group.barrier().wait()


def check_views(group):
    """Strides are kept; what is not contiguous is copied and copied back, in the stream's order."""
    device = accelerator.use_device_of(group.rank)
    whole = torch.zeros(40, 6, device=device)
    group.all_reduce(whole.t()[2:4].add_(group.rank + 1)).wait()
    expected = torch.zeros(40, 6)
    expected.t()[2:4] += sum(range(1, group.size + 1))
    assert torch.equal(whole.cpu(), expected)
    for empty in (torch.empty(0, device=device), torch.empty(3, 0, device=device)):
        group.all_reduce(empty).wait()


def check_streams(group):
    """Values are those of the stream that called; a wait is for the stream that waits."""
    device = accelerator.use_device_of(group.rank)
    x = torch.zeros(5000, device=device)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with accelerator.delayed(0.003, side):
        with side:
            x += group.rank + 1
            work = group.all_reduce(x)
        work.wait()
        assert torch.equal(x.cpu(), torch.full((5000,), float(sum(range(1, group.size + 1)))))


def _check_segments(group):
    """Values that lie in many tensors are gathered by one launch, not by a copy each; what is between them is zero."""
    device = accelerator.use_device_of(group.rank)
    parts = [(10 * i, torch.full((7,), float(i + group.rank), device=device)) for i in range(60)]
    expected = torch.cat([torch.full((7,), 2.0 * i + 1) for i in range(60)]).reshape(60, 7)
    for codec in (None, "bf16"):
        total = torch.full((600,), -1.0, device=device)
        group.barrier().wait()
        if group.rank == 0:
            emulated.reset_counters()
        group.barrier().wait()
        chosen = None if codec is None else bagua.codecs.get(codec)
        group.all_reduce(total, parts=parts, codec=chosen).wait()
        assert torch.equal(total.cpu().reshape(60, 10)[:, :7], expected)
        assert not total.cpu().reshape(60, 10)[:, 7:].any()
        group.barrier().wait()
        launches = emulated.counters()["launches"]["copy_segments"]
        assert launches == {None: group.size, "bf16": group.size**2}[codec], "of each rank; of each stripe"
        group.barrier().wait()


def _check_all(rank, world_size):
    bagua.init_process_group(timeout=20)
    try:
        for check in (check_collectives, check_views, check_streams):
            check(bagua.get_default_group())
    finally:
        bagua.destroy_process_group()


def _check_all_over_threads(rank, world_size, size):
    for check in (check_collectives, check_views, check_streams):
        thread_world(size, check)


@fast_in("size", [2], [1, 2, 3, 4])
def test_ranks_that_are_threads(alone_on_devices, size):
    alone_on_devices.run(_check_all_over_threads, args=[size])


@fast_in("world", [tcp(SIZE)], [shm(SIZE), tcp(SIZE), through_torch(SIZE)])
def test_ranks_that_are_processes(pair_on_devices, world):
    pair_on_devices.run(_check_all, env=world.env)


def _reduce_few(group, numel):
    device = accelerator.use_device_of(group.rank)
    for op, expected in ((bagua.ReduceOp.SUM, 3.0), (bagua.ReduceOp.MAX, 2.0)):
        x = torch.full((numel,), float(group.rank), device=device)
        group.all_reduce(x, op).wait()
        assert x.tolist() == [expected] * numel


def _reduce_few_over_threads(rank, world_size):
    for numel in (0, 1, 2, 4):
        thread_world(3, _reduce_few, numel)


@pytest.mark.parametrize("more", ["", ",reduce_tree_bytes=0"], ids=["rings", "stripes"])
def test_fewer_elements_than_ranks(alone_on_devices, more):
    """Some ranks have no part of them, whatever the algorithm that the thresholds choose."""
    thresholds = f"on_host_bytes=0,recursive_doubling_bytes=0{more}"
    alone_on_devices.run(_reduce_few_over_threads, env={"BAGUA_THRESHOLDS": thresholds})


def _check_small_reductions(rank, world_size):
    """The host computes them, by default: with the CPU's bits, and no kernel."""
    _check_all(rank, world_size)
    bagua.init_process_group(timeout=20)
    try:
        group, device = bagua.get_default_group(), accelerator.use_device_of(rank)
        mine = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
        for codec in (None, "bf16", "minmax_uint8", "qsgd:bits=4"):
            chosen = None if codec is None else bagua.codecs.get(codec).with_seed(7)
            found, expected = mine.to(device), mine.clone()
            if accelerator.is_emulated():
                torch.accelerator.synchronize()
                emulated.reset_counters()
            for values in (found, expected):
                group.all_reduce(values, codec=chosen).wait()
            if accelerator.is_emulated():
                assert emulated.counters()["launches"] == {}, codec
            assert torch.equal(found.cpu(), expected), codec
    finally:
        bagua.destroy_process_group()


@fast_in("world", [shm(SIZE)], [shm(SIZE), tcp(SIZE), through_torch(SIZE)])
def test_small_reductions(pair_on_devices, world):
    pair_on_devices.run(_check_small_reductions, env={**world.env, "BAGUA_THRESHOLDS": None})


def _check_rows(rank, world_size):
    """Rows with codecs and their gradients have the CPU's bits, whether or not rows are whole blocks."""
    bagua.init_process_group(timeout=20)
    try:
        device = accelerator.use_device_of(rank)
        for width, codec in itertools.product((640, 2048), ("bf16", "fp8_e4m3", "fp4_e2m1")):
            x = torch.randn(40, width, generator=torch.Generator().manual_seed(rank))
            seen = []
            for place in ("cpu", device):
                leaf = x.detach().to(place).requires_grad_()
                y, _ = bagua.exchange_rows(leaf, [10, 30] if rank == 0 else [0, 40], codec=codec)
                y.square().sum().backward()
                seen.append((y.detach().cpu(), leaf.grad.cpu()))
            (y, grad), (y_on_device, grad_on_device) = seen
            assert torch.equal(y_on_device, y) and torch.equal(grad_on_device, grad), (width, codec)
    finally:
        bagua.destroy_process_group()


@fast_in("world", [shm(SIZE)], [shm(SIZE), tcp(SIZE)])
def test_rows_with_codecs(pair_on_devices, world):
    pair_on_devices.run(_check_rows, env=world.env)


# ---- what Work promises


def _check_that_the_host_goes_on(group):
    device = accelerator.use_device_of(group.rank)
    x = torch.ones(1000, device=device)
    group.all_reduce(x).wait()  # the first connects
    were_completed = []
    with accelerator.delayed(0.01):
        for _ in range(12):
            x.fill_(1)
            work = group.all_reduce(x)
            work.wait()
            were_completed.append(work.is_completed())
            x += 1
            assert torch.equal(x.cpu(), torch.full((1000,), float(group.size) + 1))
    if accelerator.is_emulated():  # on CUDA what comes last takes microseconds
        assert not all(were_completed), "wait() waits for the device"
    deadline = time.monotonic() + 5
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.exception() is None
    dropped = torch.ones(1000, device=device)
    group.all_reduce(dropped)  # its Work is dropped, and the memory too: both live until it has ended
    del dropped
    group.barrier().wait()


def _drop_what_is_late(rank, world_size):
    """A device that is late at a deadline writes later, into memory that nobody has taken meanwhile."""
    bagua.init_process_group(timeout=20)
    device = accelerator.use_device_of(rank)
    for _ in range(2):
        group = bagua.new_group(timeout=0.25)
        x = torch.full((1000,), rank + 1.0, device=device)
        bagua.broadcast(x, 0, group=group)
        torch.accelerator.synchronize()
        bagua.barrier()
        with contextlib.ExitStack() as late:
            if rank == 1:  # 100 copies, for which the host does not wait, take 1.25 s, give or take 0.16
                here, there = torch.ones(2, 10, device=device)
                late.enter_context(emulated.delayed(0.05))
                for _ in range(100):
                    there.copy_(here)
            work = bagua.broadcast(x, 0, group=group, async_op=True)
            wait_until(work.is_completed, "the broadcast ends")
            is_late = isinstance(work.exception(), bagua.DeadlineExceeded)
            del work, x
            bagua.barrier()  # frees what was dropped
            torch.accelerator.synchronize()  # raises what the device has found
        assert is_late == (rank == 1)
        bagua.barrier()
    bagua.destroy_process_group()


@pytest.mark.timed
def test_what_a_late_device_writes_to_lives_until_then(pair_on_emulated):
    pair_on_emulated.run(_drop_what_is_late)


def _over_threads(rank, world_size, check):
    thread_world(2, check)


def _check_many_chunks(rank, world_size):
    """What takes several rounds on a device, whose chunks are large, has the CPU's bits."""
    bagua.init_process_group(timeout=20)
    try:
        group, device = bagua.get_default_group(), accelerator.use_device_of(rank)
        mine = torch.randn(4_500_077, generator=torch.Generator().manual_seed(rank))
        for codec in (None, "qsgd:bits=4"):
            chosen = None if codec is None else bagua.codecs.get(codec).with_seed(7)
            found, expected = mine.to(device), mine.clone()
            for values in (found, expected):
                group.all_reduce(values, codec=chosen).wait()
            assert torch.equal(found.cpu(), expected), codec
    finally:
        bagua.destroy_process_group()


def test_many_chunks(pair_on_devices):
    pair_on_devices.run(_check_many_chunks)


def test_segments_are_gathered_by_one_launch(alone_on_emulated):
    alone_on_emulated.run(_over_threads, args=[_check_segments])


@pytest.mark.timed
def test_wait_is_for_the_stream_and_not_for_the_host(alone_on_devices):
    alone_on_devices.run(_over_threads, args=[_check_that_the_host_goes_on])


def _check_waits_on_other_streams(group):
    """Memory lives until the operation is done with it, and every stream that waits finds what was copied back."""
    device = accelerator.use_device_of(group.rank)
    made, first, second = (torch.Stream(device) for _ in range(3))
    with emulated.delayed(0.005):
        for _ in range(10):
            with made:
                x = torch.ones(5000, device=device)
                work = group.all_reduce(x)
            with first:
                work.wait()
            del x, work
            transposed = torch.ones(50, 60, device=device).t()
            work = group.all_reduce(transposed)
            for stream in (first, second):
                stream.wait_stream(torch.accelerator.current_stream())
                transposed.record_stream(stream)
                with stream:
                    work.wait()
            with second:
                assert torch.equal(transposed.clone().cpu(), torch.full((60, 50), 2.0))
    group.barrier().wait()
    torch.accelerator.synchronize()  # raises what the device has found


def test_a_wait_on_another_stream(alone_on_emulated):
    alone_on_emulated.run(_over_threads, args=[_check_waits_on_other_streams])


# ---- what is refused


def _check_refusals(group):
    device, here = accelerator.use_device_of(group.rank), torch.ones(4)
    there, other = here.to(device), accelerator.device_of(group.rank + 1)
    calls = [
        lambda: group.all_gather(torch.empty(8), there),
        lambda: group.all_to_all(here, there),
        lambda: group.reduce_scatter(here[:2], there),
        *([lambda: group.all_gather(torch.empty(8, device=other), there)] if other != device else []),
    ]
    for call in calls:
        with pytest.raises(bagua.InvalidArgument, match=rf"on {device.type}:\d.*one device.*\.to\(device\)"):
            call()
    with pytest.raises(bagua.InvalidArgument, match=r"on meta; .* of the CPU and of CUDA devices: make it there, with"):
        group.all_reduce(torch.empty(4, device="meta"))
    group.all_reduce(there).wait()  # the group is whole
    assert torch.equal(there.cpu(), torch.full((4,), 2.0))


def test_tensors_of_two_devices_in_one_call(alone_on_devices):
    alone_on_devices.run(_over_threads, args=[_check_refusals])


def _check_host_and_device(group):
    x = torch.ones(4, device=accelerator.use_device_of(group.rank)) if group.rank == 0 else torch.ones(4)
    with pytest.raises(bagua.BaguaError, match=f"on {accelerator.kind()}"):
        group.all_reduce(x).wait(10)
        group.barrier().wait(10)


def test_a_rank_without_a_device_among_ranks_with_one(alone_on_devices):
    alone_on_devices.run(_over_threads, args=[_check_host_and_device])


def _check_capture(group):
    x = torch.ones(4, device=accelerator.use_device_of(group.rank))
    work = group.all_reduce(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: device == x.device)
        with pytest.raises(bagua.InvalidArgument, match=r"collective .* captured on emulated:0.*torch.cuda.graph"):
            group.all_reduce(x)
        with pytest.raises(bagua.InvalidArgument, match=r"waited for while a CUDA graph is captured"):
            work.wait()
    work.wait()
    group.all_reduce(x).wait()  # the group is whole
    assert x.tolist() == [1.0] * 4


def _capture(rank, world_size):
    emulated.load()
    thread_world(1, _check_capture)


def test_a_graph_that_is_captured(alone_on_emulated):
    alone_on_emulated.run(_capture)


def _run_out_of_memory(rank, world_size):
    bagua.init_process_group(timeout=10)
    try:
        group = bagua.get_default_group()
        x = torch.ones(200_000, device=accelerator.use_device_of(group.rank))
        emulated.limit_memory(1_000_000 if rank == 1 else None)
        with pytest.raises(bagua.DeviceError if rank == 1 else bagua.RemoteError, match="memory") as raised:
            group.all_reduce(x).wait()
        assert raised.value.rank in (None, 1) if rank == 1 else raised.value.rank == 1
    finally:
        emulated.limit_memory(None)
        bagua.destroy_process_group()


def test_out_of_memory_in_a_workspace_is_told_to_all(pair_on_emulated):
    pair_on_emulated.run(_run_out_of_memory, env=tcp(SIZE).env)


class CurrentGpu:
    """What torch does to the thread's current GPU, and which ones get a context by that: cudaSetDevice makes one."""

    def __init__(self):
        self.index, self.with_context = 0, {1}

    def set(self, index):
        if index != self.index:
            self.with_context.add(index)
        self.index = index

    @contextlib.contextmanager
    def device(self, device):  # torch.cuda.device comes back to a device that has none without making one
        before = self.index
        self.set(device.index)
        yield
        self.index = before

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.index
        self.set(stream.device.index)
        yield
        self.set(before)


def test_a_stream_of_another_gpu_leaves_the_current_one_without_a_context(monkeypatch):
    current, stream = CurrentGpu(), SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device", current.device)
    monkeypatch.setattr(torch.cuda, "stream", current.stream)
    with devices.on_stream(stream):
        assert current.index == 1
    assert current.index == 0
    assert current.with_context == {1}


_LATE_S = 0.5  # the deadline


def _lose_a_peer(rank, world_size):
    bagua.init_process_group(timeout=20)
    group = bagua.get_default_group()
    x = torch.ones(300_000, device=accelerator.use_device_of(group.rank))
    group.all_reduce(x).wait()
    meet()
    group.set_timeout(_LATE_S)
    if rank == 1:
        time.sleep(2.5 * _LATE_S)  # late for the second one
    begin = time.monotonic()
    with pytest.raises((bagua.DeadlineExceeded, bagua.RemoteError), match="rank 1"):
        group.all_reduce(x).wait()
    took = time.monotonic() - begin
    bagua.destroy_process_group()
    return took


@pytest.mark.timed
def test_a_late_peer_is_named_at_the_deadline(pair_on_devices):
    took, _ = pair_on_devices.run(_lose_a_peer, env=tcp(SIZE).env)
    assert 0.9 * _LATE_S < took < 3 * _LATE_S


def _lose_a_killed_peer(rank, world_size):
    bagua.init_process_group(timeout=20)
    group = bagua.get_default_group()
    x = torch.ones(300_000, device=accelerator.use_device_of(group.rank))
    group.all_reduce(x).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(bagua.TransportError, match="rank 1") as raised:
        for _ in range(3):
            group.all_reduce(x).wait()
    took = time.monotonic() - begin
    assert raised.value.rank == 1
    bagua.destroy_process_group()
    assert torch.isfinite(x.cpu()).all()  # the device goes on
    return took


@pytest.mark.timed
@fast_in("world", [tcp(SIZE)], [shm(SIZE), tcp(SIZE)])
def test_a_killed_peer_is_named_at_once(pair_on_devices, world):
    took, _ = pair_on_devices.run(_lose_a_killed_peer, env=world.env, expect_exit={1: -signal.SIGKILL})
    assert took < 5

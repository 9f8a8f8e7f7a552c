"""The NCCL that torch has, between two ranks: what the fake one of test_nccl.py leaves open. On one GPU, which NCCL
gives to one rank of a host only unless it is 2.30 or later and told so, the ranks of an earlier one call themselves
different hosts, and it goes by the network."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import bagua
from bagua import _C
from tests import accelerator
from tests.distributed.test_devices import check_collectives, check_streams, check_views
from tests.distributed.test_nccl import until_rank_1_is_named
from tests.meeting import meet, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timed]  # NCCL's kernels spin: ranks on one GPU take turns of milliseconds

_LATE_S = 1.5


@pytest.fixture
def pair(device_pools):
    return device_pools(accelerator.CUDA, 2)


def group_over_nccl(rank):
    if torch.cuda.device_count() < 2:
        may_share = tuple(map(int, _C.nccl_version().split("."))) >= (2, 30)
        shares = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if may_share else {"NCCL_HOSTID": f"host {rank}"}
        os.environ.update(shares, NCCL_SOCKET_IFNAME="lo")
    accelerator.use_device_of(rank)
    bagua.init_process_group("nccl", timeout=30)
    return bagua.get_default_group()


def leave():
    bagua.destroy_process_group()
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):  # for the ranks' next test, which may stage
        os.environ.pop(name, None)


def run_collectives(rank, world_size):
    group = group_over_nccl(rank)
    try:
        for check in (check_collectives, check_views, check_streams):
            check(group)
        return group.device_path
    finally:
        leave()


def test_collectives(pair):
    assert pair.run(run_collectives) == [f"NCCL {_C.nccl_version()}"] * 2


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def train(rank, world_size):
    """The weights after some steps, and those of one process with the gradients' mean."""
    group = group_over_nccl(rank)
    try:
        device = accelerator.device_of(rank)
        alone, model = make_model(), make_model().to(device)
        reference = torch.optim.SGD(alone.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="gradient_allreduce", group=group)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            batches = [torch.randn(4, 8, generator=generator) for _ in range(world_size)]
            reference.zero_grad()
            torch.stack([alone(one).square().mean() for one in batches]).mean().backward()
            reference.step()
            optimizer.zero_grad()
            model(batches[rank].to(device)).square().mean().backward()
            optimizer.step()
        weights, expected = ([p.detach() for p in of.parameters()] for of in (model, alone))
        assert accelerator.agree(weights, expected)
    finally:
        leave()


def test_training(pair):
    pair.run(train)


def kill_rank_1_in_an_all_reduce(group, rank, numel):
    """A tensor and the Work of its all_reduce, in which rank 1 is killed: its part stands in its stream, and that of
    rank 0 waits for it."""
    x = torch.ones(numel, device=accelerator.device_of(rank))
    group.all_reduce(x).wait()
    torch.accelerator.synchronize()
    meet()
    if rank == 1:
        torch.cuda._sleep(int(20e9))
    work = group.all_reduce(x)
    work.wait()
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x, work


def lose_a_peer(rank, world_size):
    group = group_over_nccl(rank)
    x, work = kill_rank_1_in_an_all_reduce(group, rank, 300_000)
    took = until_rank_1_is_named(group, work, x)
    leave()
    assert torch.isfinite(x.cpu()).all()  # the device goes on
    return took


def test_a_peer_that_is_killed_in_a_collective_is_named(pair):
    took, _ = pair.run(lose_a_peer, expect_exit={1: -signal.SIGKILL})
    assert took < 5


def free_memory(x):
    y = torch.empty(100_000_000, device=x.device)
    del y
    torch.cuda.empty_cache()


# Behind a collective whose peer is gone, each of these stands still in CUDA, and some of them with a lock that every
# other thread needs for its calls.
STANDS_IN = {
    "item": lambda x: x.sum().item(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.ones(x.shape)),
    "free": free_memory,
    "many launches": lambda x: [x.add_(1) for _ in range(4000)],
    "first launch": lambda x: torch.special.i1e(torch.lgamma(x)),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def lose_a_peer_while_in_cuda(rank, world_size, stands_in):
    """And the program of rank 0 goes on to something that waits for the device."""
    group = group_over_nccl(rank)
    x, work = kill_rank_1_in_an_all_reduce(group, rank, 3_000_000)
    program = threading.Thread(target=STANDS_IN[stands_in], args=(x,), daemon=True)
    begin = time.monotonic()
    program.start()
    wait_until(work.is_completed, "an all_reduce with a killed peer fails")
    failed = time.monotonic() - begin
    program.join(timeout=20)
    took = time.monotonic() - begin
    assert not program.is_alive()
    until_rank_1_is_named(group, work, x)
    leave()
    return failed, took


@pytest.mark.parametrize("stands_in", STANDS_IN)
def test_a_program_that_stands_in_cuda_goes_on_when_its_peer_is_gone(pair, stands_in):
    took, _ = pair.run(lose_a_peer_while_in_cuda, args=(stands_in,), expect_exit={1: -signal.SIGKILL})
    assert max(took) < 5


def meet_a_late_device(rank, world_size):
    """The device of rank 1 stands still for longer than the deadline."""
    group = group_over_nccl(rank)
    x = torch.ones(300_000, device=accelerator.device_of(rank))
    group.all_reduce(x).wait()
    torch.accelerator.synchronize()
    group.set_timeout(_LATE_S)
    meet()
    if rank == 1:
        torch.cuda._sleep(int(3 * _LATE_S * 1.5e9))
    begin = time.monotonic()
    work = group.all_reduce(x)
    wait_until(work.is_completed, "an all_reduce past its deadline fails")
    took = time.monotonic() - begin
    error = work.exception()
    meet()
    leave()
    return took, type(error), str(error)


def test_a_late_device_ends_at_the_deadline_on_all_ranks(pair):
    for took, error, message in pair.run(meet_a_late_device):
        assert issubclass(error, (bagua.DeadlineExceeded, bagua.RemoteError)), message
        assert 0.9 * _LATE_S < took < 3 * _LATE_S, message

"""Which way tensors of a device go, NCCL or staged, and what NCCL does to a group: between two ranks with an emulated
device each, over the fake libnccl, which refuses what NCCL would not forgive. Its calls, their order and their grouping
are csrc/tests/test_nccl.cc's."""

from __future__ import annotations

import logging
import os
import re
import signal
import time

import pytest
import torch

import bagua
from tests import accelerator
from tests.distributed.test_devices import check_collectives, check_streams, check_views
from tests.emulated_device import nccl
from tests.meeting import meet, wait_until

NOWHERE = "/nowhere/libnccl.so.2"
TOO_OLD = 21399  # 2.14 is the first that will do


@pytest.fixture
def pair(pair_on_emulated):
    """Two ranks for which there is a fake libnccl."""
    nccl.build()  # here, where no deadline runs
    yield pair_on_emulated
    pair_on_emulated.run(leave)


def leave(rank, world_size):
    nccl.leave()


class _Lines(logging.Handler):
    """What bagua logs about the way of tensors of devices."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if "tensors of devices" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self):
        logger = logging.getLogger("bagua")
        self.level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("bagua").removeHandler(self)
        logging.getLogger("bagua").setLevel(self.level)


def run_collectives(rank, world_size, backend, of_rank_1, shares_device):
    """The way that the group took, after every collective; what NCCL was called, and what was logged."""
    nccl.use(**(of_rank_1 if rank == 1 else {}))
    bagua.init_process_group(backend, timeout=20)
    try:
        group = bagua.get_default_group()
        with _Lines() as lines:
            assert group.device_path == ""
            if shares_device:
                x = torch.ones(500, device=accelerator.device_of(0))
                group.all_reduce(x).wait()
                assert torch.equal(x.cpu(), torch.full((500,), 2.0))
            else:
                for check in (check_collectives, check_views, check_streams):
                    check(group)
            path = group.device_path
            bagua.destroy_process_group()  # after which there are no more lines
    finally:
        bagua.destroy_process_group()
    assert nccl.violations() == ""
    return path, nccl.calls(), lines


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_collectives_go_over_it(pair, backend):
    for path, calls, lines in pair.run(run_collectives, args=(backend, {}, False)):
        assert path == "NCCL 2.27.3"
        assert lines == ["tensors of devices in the group 'world' move by NCCL 2.27.3"]  # once for all of them
        assert calls.count("init") == 1
        assert calls[-2:] == ["finalize", "destroy"]
        assert {"all_reduce 2100", "all_gather 8400", "reduce_scatter 2100"} <= {*calls}
        assert any(call.startswith("group{") for call in calls)


@pytest.mark.parametrize(
    "backend, of_rank_1, shares_device, why",
    [
        ("native", {}, False, "rank 0 asks for it"),
        ("auto", {"path": NOWHERE}, False, f"rank 1 has no usable NCCL: .*{NOWHERE}.*"),
        ("auto", {"version": TOO_OLD}, False, r"rank 1 has no usable NCCL: .* is NCCL 2\.13\.99, which is too old.*"),
        ("auto", {"version": 22105}, False, r"rank 0 has NCCL 2\.27\.3, rank 1 has 2\.21\.5"),
        ("auto", {}, True, "ranks 0 and 1 share the device emulated:0, and NCCL needs one for each"),
    ],
    ids=["asked for", "missing", "too old", "versions differ", "one device"],
)
def test_or_are_staged(pair, backend, of_rank_1, shares_device, why):
    for path, calls, (line,) in pair.run(run_collectives, args=(backend, of_rank_1, shares_device)):
        assert calls == []
        assert line == f"tensors of devices in the group 'world' move by {path}"
        assert re.fullmatch(f"staged: {why}", path)


def refuse(rank, world_size, of_rank_1, shares_device):
    nccl.use(**(of_rank_1 if rank == 1 else {}))
    bagua.init_process_group("nccl", timeout=20)
    group = bagua.get_default_group()
    device = accelerator.use_device_of(0 if shares_device else rank)
    # Each rank comes to it by itself, or hears of another one that was faster.
    with pytest.raises((bagua.InvalidArgument, bagua.RemoteError)) as raised:
        group.all_reduce(torch.ones(500, device=device)).wait(10)
    bagua.destroy_process_group()
    return str(raised.value), nccl.calls()


@pytest.mark.parametrize(
    "of_rank_1, shares_device, why",
    [
        ({"path": NOWHERE}, False, f"rank 1 has no usable NCCL: .*{NOWHERE}"),
        ({"version": TOO_OLD}, False, r"rank 1 has no usable NCCL: .* is NCCL 2\.13\.99, which is too old"),
        ({}, True, "ranks 0 and 1 share the device emulated:0"),
    ],
    ids=["missing", "too old", "one device"],
)
def test_asked_for_where_it_cannot_be_is_an_error_of_all_ranks(pair, of_rank_1, shares_device, why):
    for message, calls in pair.run(refuse, args=(of_rank_1, shares_device)):
        assert re.search(f"rank 0 asks for NCCL, but {why}", message)
        assert calls == []


def read_after_the_end(rank, world_size, backend):
    """Rank 1 comes late, and rank 0 is done with the group by then, but its device is not."""
    nccl.use()
    bagua.init_process_group(backend, timeout=20)
    group = bagua.get_default_group()
    x = torch.ones(3000, device=accelerator.use_device_of(rank))
    group.all_reduce(x).wait()
    group.barrier().wait()
    if rank == 1:
        time.sleep(0.2)
    group.all_reduce(x).wait()
    bagua.destroy_process_group()
    assert torch.equal(x.cpu(), torch.full((3000,), 4.0))


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_what_was_waited_for_ends_well_though_the_group_is_destroyed(pair, backend):
    pair.run(read_after_the_end, args=[backend])


def leave_unwaited(rank, world_size):
    nccl.use()
    bagua.init_process_group("nccl", timeout=20)
    group = bagua.get_default_group()
    x = torch.ones(3000, device=accelerator.use_device_of(rank))
    group.all_reduce(x).wait()
    if rank == 1:
        meet()  # its leave is no cause
        return bagua.destroy_process_group()
    work = group.all_reduce(x)
    bagua.destroy_process_group()
    meet()
    return str(work.exception())


def test_what_nobody_waits_for_is_aborted_with_its_group(pair):
    message, _ = pair.run(leave_unwaited)
    assert "destroyed the group 'world' with 1 operation pending; wait for them first" in message


def stand_behind(rank, world_size):
    """An operation of one group behind one of another that hangs, on the device."""
    nccl.use()
    bagua.init_process_group("nccl", timeout=20)
    device = accelerator.use_device_of(rank)
    hanging, quick = bagua.new_group(timeout=20), bagua.new_group(timeout=0.5)
    y, z = torch.ones(3000, device=device), torch.ones(3000, device=device)
    for group, tensor in ((hanging, y), (quick, z)):
        bagua.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    bagua.barrier()
    if rank == 1:
        nccl.hang(1)
    num_calls = len(nccl.calls())
    works = [bagua.all_reduce(y, group=hanging, async_op=True)]
    wait_until(lambda: len(nccl.calls()) > num_calls, "the operation before is enqueued")
    begin = time.monotonic()
    works.append(bagua.all_reduce(z, group=quick, async_op=True))
    wait_until(works[1].is_completed, "an operation behind another group's has failed")
    took, error = time.monotonic() - begin, works[1].exception()
    assert not works[0].is_completed()
    bagua.destroy_process_group()
    return took, type(error).__name__, str(error), hanging.name


@pytest.mark.timed
def test_who_stands_behind_another_group_says_so_in_time(pair):
    for took, kind, message, name in pair.run(stand_behind):
        assert 0.4 < took < 2.5 and kind in ("DeadlineExceeded", "RemoteError")
        assert "has not begun all_reduce #2" in message, message
        assert f"it stands behind an operation of the group '{name}' on that device, which has not ended" in message


def until_rank_1_is_named(group, work, x):
    """Seconds until an all_reduce that waits for rank 1, which was killed, has failed; so does what comes after it."""
    begin = time.monotonic()
    wait_until(work.is_completed, "an all_reduce with a killed peer fails")
    took = time.monotonic() - begin
    for raises in (lambda: work.wait(), lambda: group.all_reduce(x)):
        with pytest.raises(bagua.TransportError, match="rank 1") as raised:
            raises()
        assert raised.value.rank == 1
    return took


def lose_a_peer(rank, world_size):
    """Rank 1 is killed when its part of an all_reduce stands in its stream, and that of rank 0 waits for it."""
    nccl.use()
    bagua.init_process_group("nccl", timeout=20)
    group = bagua.get_default_group()
    x = torch.ones(300_000, device=accelerator.use_device_of(rank))
    group.all_reduce(x).wait()
    torch.accelerator.synchronize()
    if rank == 1:
        nccl.hang(1)
    work = group.all_reduce(x)
    work.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    took = until_rank_1_is_named(group, work, x)
    calls = nccl.calls()
    bagua.destroy_process_group()
    assert torch.isfinite(x.cpu()).all()  # the device goes on
    return took, calls


@pytest.mark.timed
def test_a_peer_that_is_killed_in_a_collective_is_named(pair):
    (took, calls), _ = pair.run(lose_a_peer, expect_exit={1: -signal.SIGKILL})
    assert took < 5
    assert calls[-1] == "abort"  # a destroy could wait for the dead

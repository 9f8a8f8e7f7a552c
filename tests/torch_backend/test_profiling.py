"""The events of torch's profilers: those that torch's own backend has, with the same shapes."""

import sys
from collections import Counter

import pytest
import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.programs import needs_torch, on_both, run

pytestmark = needs_torch
ENDS_ELSEWHERE = torch.__version__ >= (2, 12)  # an event may end on another thread than it has begun on


def observe(rank, world_size):
    x, peer = torch.ones(2, 3), rank ^ 1
    many = [torch.zeros(2, 3) for _ in range(world_size)]
    model = DistributedDataParallel(torch.nn.Linear(4, 5))

    def work():
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(many, x)
        dist.gather(x, many if rank == 0 else None, 0)
        dist.scatter(x, many if rank == 0 else None, 0)
        if rank < peer:
            dist.send(x, peer)
        else:
            dist.recv(x, peer)
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
        dist.barrier()
        model(torch.ones(1, 4)).sum().backward()

    work()
    found = []
    for profile in (torch.profiler.profile(record_shapes=True), torch.autograd.profiler.profile(record_shapes=True)):
        with profile as profiled:
            work()
        events = profiled.events() if hasattr(profiled, "events") else profiled.function_events
        prefix = f"{dist.get_backend()}:"
        found.append(
            [
                (
                    event.name.removeprefix(prefix),
                    event.is_async and ENDS_ELSEWHERE,
                    event.count,
                    event.input_shapes,
                    event.cpu_time >= 0,
                )
                for event in (events or profiled.function_events)
                if event.name.startswith(prefix)
            ]
        )
    return found


def test_events_of_the_profiler(pool2):
    for rank, result in enumerate(pool2.run(on_both, args=(observe, ()))):
        names = {name for name, *_ in result["gloo"][0]}
        assert {"all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_to_all", "barrier"} < names
        for ours, gloos in zip(result["bagua"], result["gloo"], strict=True):
            ours, gloos = Counter(map(repr, ours)), Counter(map(repr, gloos))
            assert not gloos - ours, rank
            assert not ENDS_ELSEWHERE or not ours - gloos, rank  # otherwise gloo's own are not all there


def unprofiled(rank, world_size):
    """Without a profiler not one of its functions is called."""
    called = []

    def spy(frame, event, argument):
        if event == "c_call" and "record_function" in getattr(argument, "__name__", ""):
            called.append(argument.__name__)

    sys.setprofile(spy)
    try:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    finally:
        sys.setprofile(None)
    assert not called and not profiler._is_profiler_enabled


def test_without_a_profiler(pool2):
    run(pool2, unprofiled)


def refused(rank, world_size):
    """An operation that is refused leaves no event open, nor a thread."""
    with torch.profiler.profile() as profiled:
        with pytest.raises(ValueError):
            dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
        dist.barrier()
    assert {event.name for event in profiled.events()} >= {"bagua:all_reduce", "bagua:barrier"}


def test_a_refused_operation(pool2):
    run(pool2, refused)

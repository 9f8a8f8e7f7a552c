"""The handle: futures without a thread per operation, their exceptions, and handles that are dropped."""

import gc
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.testing import Pool, kill
from bagua.torch_backend import TorchWork
from tests.distributed.worlds import fast_in
from tests.meeting import meet, wait_until
from tests.torch_backend.programs import compare, needs_torch, run, start, values

pytestmark = needs_torch


def futures(rank, world_size):
    dist.barrier()  # the ranks are connected; the threads that dial are gone, or will be
    threads = threading.active_count()
    works, tensors = [], []
    for i in range(50):
        x = values(rank, world_size, 24).view(4, 6)[:, ::2] if i % 2 else values(rank, world_size, 100) + i
        works.append(dist.all_reduce(x, async_op=True))
        tensors.append(x)
    results = [work.get_future().then(lambda future: future.value()[0].sum()) for work in works]
    assert works[0].get_future() is not None and threading.active_count() <= threads + 1
    for i, result in enumerate(torch.futures.wait_all(results)):
        ranks = range(world_size)
        if i % 2:
            assert result == sum(values(r, world_size, 24).view(4, 6)[:, ::2].sum() for r in ranks)
        else:
            assert result == sum((values(r, world_size, 100) + i).sum() for r in ranks)
        assert torch.equal(works[i].result()[0], tensors[i])


def test_futures(pool2):
    run(pool2, futures)


def ended(rank, world_size):
    """An operation had ended before its future was created."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    ran_on = []
    work.get_future().add_done_callback(lambda _: ran_on.append(threading.current_thread()))
    for _ in range(1000):  # not at once on this thread, where it would come before those of operations that run
        if ran_on:
            break
        time.sleep(0.01)
    assert ran_on[0].name.startswith("bagua-callbacks-")
    work.synchronize()
    assert work.wait() and work.is_success()


def test_a_future_of_what_has_ended(pool2):
    run(pool2, ended)


def not_put_back(rank, world_size):
    """A result that could not be copied to its tensor is no success, and polling does not raise."""
    target = torch.zeros(4, 3).t()
    work = dist.all_reduce(target, async_op=True)

    def fail():
        raise MemoryError("no room")

    work._works[0].finish_with(fail)
    while not work.is_completed():
        time.sleep(0.001)
    assert not work.is_success() and isinstance(work.exception(), MemoryError)
    with pytest.raises(MemoryError):
        work.wait()


def test_a_failed_copy_back(pool2):
    run(pool2, not_put_back)


def several(rank, world_size):
    """The future of coalesced operations completes after the last of them."""
    group = dist.group.WORLD
    xs = [values(rank, world_size, numel) for numel in (200_000, 3, 7)]
    work = group.allreduce_coalesced(xs)
    for x, y in zip(work.get_future().wait(), xs, strict=True):
        assert torch.equal(x, sum(values(r, world_size, len(x)) for r in range(world_size))) and x is y


def test_the_future_of_several_operations(pool2):
    run(pool2, several)


def very_many(rank, world_size):
    """More operations behind one future than Python may nest calls."""
    num_works = 2 * sys.getrecursionlimit()
    xs = [torch.full((3,), float(rank + i)) for i in range(num_works)]
    work = dist.group.WORLD.allreduce_coalesced(xs)
    assert len(work.get_future().wait()) == num_works
    for i, x in enumerate(xs):
        assert x.tolist() == 3 * [float(sum(r + i for r in range(world_size)))]


def test_the_future_of_very_many_operations(pool2):
    run(pool2, very_many)


def late(rank, world_size):
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert not work.is_completed() and work.exception() is None
        with pytest.raises(bagua.DeadlineExceeded, match="still running"):
            work.wait(timedelta(seconds=0.05))
        bagua.barrier()
        assert work.wait(timedelta(seconds=20))
    else:
        bagua.barrier()
        dist.all_reduce(torch.ones(3))


def test_wait_with_a_timeout(pool2):
    run(pool2, late)


def loud(rank, world_size):
    """On the thread that ends operations a callback of ours may look and compute, but start and end nothing; what it
    raises is not lost."""
    group, seen, done = bagua.get_default_group(), [], threading.Event()
    before, sys.unraisablehook = sys.unraisablehook, lambda unraisable: seen.append(unraisable.exc_value)
    if rank == 0:
        work = group.all_reduce(torch.ones(3))
        work.add_done_callback(lambda: 1 / 0)
        work.add_done_callback(lambda: group.all_reduce(torch.ones(3)))
        work.add_done_callback(group.close)
        work.add_done_callback(done.set)
        dist.barrier()
        assert done.wait(20)
        sys.unraisablehook = before
        assert isinstance(seen[0], ZeroDivisionError)
        assert isinstance(seen[1], bagua.InvalidArgument) and "starts or waits for an operation" in str(seen[1])
        assert isinstance(seen[2], bagua.InvalidArgument) and "from another one" in str(seen[2])
    else:
        dist.barrier()
        group.all_reduce(torch.ones(3)).wait()
    sys.unraisablehook = before


def test_what_a_callback_raises_is_reported(pool2):
    run(pool2, loud)


@pytest.fixture
def without_others(pool2):
    """Collections in the ranks look at what the test makes only: of all that is there they would take long."""
    pool2.run(freeze)
    yield
    pool2.run(unfreeze)


def freeze(rank, world_size):
    gc.collect()
    gc.freeze()


def unfreeze(rank, world_size):
    gc.unfreeze()


def uneven(rank, world_size, divides_by_all):
    """Rank r has 2 + r batches. The reducer keeps the C++ half of each forward's Work, and Python drops the other."""
    torch.manual_seed(5)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    found = []
    with model.join(divide_by_initial_world_size=divides_by_all):
        for step in range(2 + rank):
            model.zero_grad()
            loss = model(torch.sin(torch.arange(6.0).view(2, 3) + rank + step)).square().sum()
            gc.collect()
            loss.backward()
            found.append(model.module.weight.grad.clone())
    return found


@fast_in("divides_by_all", [False], [True, False])
def test_uneven_inputs(pool2, without_others, divides_by_all):
    compare(pool2, uneven, divides_by_all)


def uneven_and_busy(rank, world_size):
    """The program starts very many operations between forward and backward."""
    torch.manual_seed(5)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    found = []
    with model.join(divide_by_initial_world_size=False):
        for step in range(2):
            model.zero_grad()
            loss = model(torch.sin(torch.arange(6.0).view(2, 3) + rank + step)).square().sum()
            for work in [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(600)]:
                work.wait()
            gc.collect()
            loss.backward()
            found.append(model.module.weight.grad.clone())
    return found


@pytest.mark.slow("test_uneven_inputs")
def test_uneven_inputs_beside_many_operations(pool2, without_others):
    compare(pool2, uneven_and_busy)


def works_alive():
    gc.collect()
    return {each for each in gc.get_objects() if type(each) is TorchWork}


def kept_by_reducers(rank, world_size):
    """One Work for each model, as long as that lives."""
    num_models, before = 2, works_alive()
    models = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2)) for _ in range(num_models)]
    for model in models:
        with model.join(divide_by_initial_world_size=False):
            for _ in range(5):
                model(torch.ones(2, 3)).sum().backward()
    wait_until(lambda: len(works_alive() - before) == num_models, "the thread of callbacks lets go of the last future")
    del models, model
    assert not works_alive() - before


def test_a_reducer_keeps_one_work(pool2, without_others):
    run(pool2, kept_by_reducers)


DEADLINE_S = 0.5


def left_alone(rank, world_size):
    """The Python half of a Work is dropped, its C++ half waits, and the other rank never comes."""
    start()
    store = dist.distributed_c10d._get_default_group().get_group_store()
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=DEADLINE_S))
    if rank == 0:
        x = torch.ones(1)
        torch._C._distributed_c10d._register_work(x, dist.all_reduce(torch.ones(1), async_op=True))
        gc.collect()
        begin = time.monotonic()
        with pytest.raises(bagua.DeadlineExceeded) as raised:
            torch.ops._c10d_functional.wait_tensor(x)
        assert raised.value.rank == 1 and time.monotonic() - begin < 10 * DEADLINE_S
        store.set("done", "1")
    else:
        store.wait(["done"], timedelta(seconds=60))
    dist.destroy_process_group()


@pytest.mark.timed
def test_a_dropped_work_keeps_its_deadline(pool2):
    pool2.run(left_alone)


def forget(rank, world_size):
    """Operations without a wait do not accumulate."""
    alive = []
    for _ in range(600):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        alive.append(weakref.ref(work))
        del work
    dist.barrier()
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0


def test_dropped_works_are_forgotten(pool2):
    run(pool2, forget)


VICTIM, TIMEOUT_S, NOTICED_S = 1, 20.0, 8.0


def survive(rank, world_size):
    """Each way of waiting ends with an error that names the rank that died."""
    start(timeout=timedelta(seconds=TIMEOUT_S))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        dist.barrier(group)
    meet()
    if rank == VICTIM:
        meet()
        kill()
    future = dist.all_reduce(torch.ones(10), group=groups[0], async_op=True).get_future()
    functional = torch.distributed._functional_collectives.all_reduce(torch.ones(3), "sum", groups[1])
    polled = dist.all_reduce(torch.ones(10), group=groups[2], async_op=True)
    meet()
    begin = time.monotonic()
    messages = []
    with pytest.raises((RuntimeError, bagua.BaguaError)) as raised:  # where it is known already, at the call
        model(torch.ones(2, 4)).sum().backward()
    messages.append(str(raised.value))
    for call in (lambda: dist.all_reduce(torch.ones(1000), group=groups[3]), lambda: functional + 0):
        with pytest.raises(bagua.BaguaError) as raised:
            call()
        assert raised.value.rank == VICTIM
        messages.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        future.wait()
    messages.append(str(raised.value))
    while not polled.is_completed():
        time.sleep(0.01)
    assert polled.exception().rank == VICTIM and not polled.is_success()
    assert time.monotonic() - begin < NOTICED_S
    dist.destroy_process_group()
    return messages


@pytest.mark.timed
def test_a_killed_rank_is_named():
    with Pool(3) as pool:
        for messages in pool.run(survive, expect_exit={VICTIM: signal.SIGKILL}):
            for message in messages or ():
                assert f"rank {VICTIM} " in message, messages

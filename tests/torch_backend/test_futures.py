"""Futures whose callbacks start operations, such as communication hooks: one order on all ranks, separate threads."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bagua.cli import rank as as_rank
from bagua.errors import InternalError
from bagua.torch_backend import lifecycle
from tests.distributed.worlds import fast_in
from tests.torch_backend.programs import compare, needs_torch, run, values

pytestmark = needs_torch


def chained(rank, world_size):
    """A callback starts an operation and waits for its future, whose callback does the same."""
    names = []

    def again(future):
        names.append(threading.current_thread().name)
        y = future.value()[0] * (rank + 1)
        return dist.all_reduce(y, async_op=True).get_future().then(lambda f: third(f.value()[0])).wait()

    def third(y):
        names.append(threading.current_thread().name)
        z = y + rank
        dist.all_reduce(z)
        return z

    results = []
    for i in range(6):
        x = values(rank, world_size, 50) + i
        results.append(dist.all_reduce(x, async_op=True).get_future().then(again))
        dist.all_reduce(torch.ones(50))  # meanwhile the program goes on
    ranks = range(world_size)
    for i, result in enumerate(results):
        first = sum(values(r, world_size, 50) + i for r in ranks)
        second = sum(first * (r + 1) for r in ranks)
        assert torch.equal(result.wait(), sum(second + r for r in ranks))
    assert all(name.startswith("bagua-callbacks-") for name in names) and len(set(names)) == 2
    assert threading.active_count() < 20


def test_a_callback_starts_operations_and_waits_for_them(pool2):
    run(pool2, chained)


def collected(rank, world_size, kind):
    """The last future, and so the thread of the callback, differs between ranks; on some all futures have completed.

    The callback starts an operation and waits for its future, and has another callback after it.
    """
    one, two = dist.new_group(), dist.new_group()
    results = []
    for turn in range(8):
        groups = [one, two] if kind != "one group" else [None, None]
        gate = threading.Event()
        last = (turn + rank) % 2
        before = [dist.barrier(group, async_op=True).get_future() for group in groups]
        if dist.get_backend() == "bagua":  # gloo's threads are not to be held up
            before[last].add_done_callback(lambda _, gate=gate: gate.wait(20))
        tensors = [values(rank, world_size, 9) + turn + i for i in range(2)]
        futures = [
            dist.all_reduce(x, group=group, async_op=True).get_future()
            for x, group in zip(tensors, groups, strict=True)
        ]
        if kind != "one group":
            futures[1 - last].wait()

        def total(_future, tensors=tensors, gate=gate):  # no group, which gloo's threads must not be last to let go
            gate.set()  # on the thread of the program it waits for the other one
            z = (tensors[0] + 2 * tensors[1]) * (rank + 1)
            third = dist.all_reduce(z, async_op=True).get_future()
            return third.then(lambda f: 3 * f.value()[0]).wait()

        if (turn // 2 + rank) % 2:  # all are done on this rank, and perhaps not on the other
            gate.set()
            torch.futures.wait_all(futures)
        if kind == "nested":
            futures = [torch.futures.collect_all(futures[:1]), torch.futures.collect_all(futures[1:])]
        result = torch.futures.collect_all(futures).then(total)
        gate.set()
        results.append(result.wait())
    return results


@fast_in("kind", ["nested", "two groups"], ["one group"])
def test_callbacks_of_collected_futures(pool2, kind):
    found = compare(pool2, collected, kind)
    for turn in range(8):
        each = [values(r, 2, 9) + turn for r in range(2)]
        expected = 3 * sum((r + 1) * (sum(each) + 2 * (sum(each) + 2)) for r in range(2))
        assert all(torch.equal(result[turn], expected) for result in found)


def collected_in_a_callback(rank, world_size):
    """Inside a callback too, while the program goes on with operations of its own."""
    other = dist.new_group()

    def inner(future):
        x = future.value()[0]
        pair = [x * (rank + 1), x + rank]
        futures = [
            dist.all_reduce(y, group=group, async_op=True).get_future()
            for y, group in zip(pair, (None, other), strict=True)
        ]
        if rank:
            torch.futures.wait_all(futures)
        return torch.futures.collect_all(futures).then(outer).wait()

    def outer(collected):
        z = sum(future.value()[0] for future in collected.value()) * (rank + 1)
        dist.all_reduce(z)
        return z

    results = []
    for turn in range(6):
        x = values(rank, world_size, 50) + turn
        results.append(dist.all_reduce(x, async_op=True).get_future().then(inner))
        dist.all_reduce(torch.ones(50))
        dist.all_reduce(torch.ones(50), group=other)
    ranks = range(world_size)
    for turn, result in enumerate(results):
        first = sum(values(r, world_size, 50) + turn for r in ranks)
        pair = sum(first * (r + 1) for r in ranks) + sum(first + r for r in ranks)
        assert torch.equal(result.wait(), sum(pair * (r + 1) for r in ranks))


def test_futures_collected_in_a_callback(pool2):
    run(pool2, collected_in_a_callback)


def model_of_buckets():
    torch.manual_seed(7)
    return torch.nn.Sequential(*[torch.nn.Linear(24, 24, bias=False) for _ in range(6)])


def gradients(rank, model, step):
    model.zero_grad()
    model(torch.sin(torch.arange(48.0).view(2, 24) + rank + step)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def unequal_ranks(rank, world_size):
    """Buckets are equal, and ranks reach them at different times: operations of hooks are not confused."""
    model = DistributedDataParallel(model_of_buckets(), bucket_cap_mb=0.001)

    def hook(_state, bucket):
        def twice(future):
            y = future.value()[0] * (rank + 1)
            dist.all_reduce(y)
            return y

        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        if (bucket.index() + rank) % 2:
            time.sleep(0.01)  # by now it has ended, mostly; on the other rank it has not
        return future.then(twice)

    model.register_comm_hook(None, hook)
    plain = model_of_buckets()
    for step in range(4):
        found = gradients(rank, model, step)
        each = [gradients(r, plain, step) for r in range(world_size)]
        for i, gradient in enumerate(found):
            expected = sum(r + 1 for r in range(world_size)) * sum(grads[i] for grads in each)
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_hooks_start_operations_in_one_order(pool2):
    run(pool2, unequal_ranks)


def power_sgd(rank, world_size):
    """With as many ranks of the matrix as it has, nothing is lost: the gradients are the averages."""
    model = DistributedDataParallel(model_of_buckets(), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=24, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    plain = model_of_buckets()
    for step in range(5):
        found = gradients(rank, model, step)
        each = [gradients(r, plain, step) for r in range(world_size)]
        for i, gradient in enumerate(found):
            torch.testing.assert_close(gradient, sum(grads[i] for grads in each) / world_size, rtol=1e-3, atol=1e-3)


def test_power_sgd(pool2):
    run(pool2, power_sgd)


def failing(rank, world_size):
    """An exception of a callback is in the future that it completes, and in all that depend on it."""
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    behind = future.then(lambda _: 1 // 0).then(lambda f: f.value())
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        behind.wait()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.futures.wait_all([future, behind])
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model.register_comm_hook(
        None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda _: 1 // 0)
    )
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        model(torch.ones(1, 3)).sum().backward()


def test_the_failure_of_a_callback(pool2):
    run(pool2, failing)


class Odd(RuntimeError):
    """Cannot be copied."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def freed_after_a_failure(rank, world_size):
    """Tensors of a callback that raised, and of its caller, are freed; the error says where it was raised."""
    watched = []

    def fails(error):
        def callback(future):
            made = torch.ones(3)
            watched.append(weakref.ref(made))
            raise error

        return callback

    def wait(error):
        own = torch.ones(3)
        watched.append(weakref.ref(own))
        future = dist.all_reduce(own, async_op=True).get_future().then(fails(error))
        try:
            future.wait()
        except RuntimeError as raised:
            notes = "".join(getattr(raised, "__notes__", []) + getattr(raised.__cause__, "__notes__", []))
            assert not hasattr(raised, "add_note") or ("test_futures.py" in notes and "in callback" in notes), notes
            with pytest.raises(RuntimeError):
                future.then(lambda one: one.value()).wait()
            return type(raised), str(raised)

    assert wait(ValueError("a value")) == (RuntimeError, "ValueError: a value")
    assert wait(InternalError("a bug", rank=1)) == (InternalError, "a bug")
    assert wait(Odd("one", "two")) == (RuntimeError, "Odd: one two")
    dist.barrier()
    gc.collect()
    assert [one() for one in watched] == [None] * 6


def test_the_failure_of_a_callback_keeps_nothing(pool2):
    run(pool2, freed_after_a_failure)


def left_alone(rank, world_size):
    """DDP raises a new exception; the rank at fault is found by its text, also after the group is destroyed."""
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    if rank == 0:
        with pytest.raises(RuntimeError, match="TransportError: rank 1 left the group") as caught:
            model(torch.ones(1, 3)).sum().backward()
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        dist.destroy_process_group()
        text = str(caught.value).partition("RuntimeError: ")[2].partition("\n")[0]
        assert as_rank._followed(caught.value, "0") == (1, text)
        assert as_rank._followed(caught.value, "1") is None
        assert as_rank._followed(RuntimeError("another one"), "0") is None
    else:
        dist.destroy_process_group()
    dist.init_process_group("bagua")


def test_the_rank_at_fault_where_torch_raises_it_anew(pool2):
    run(pool2, left_alone)


def destroyed_within(rank, world_size):
    """A callback may end the group; all ranks get an error."""
    done = threading.Event()

    def end(_future):
        dist.destroy_process_group()
        done.set()

    dist.all_reduce(torch.ones(3), async_op=True).get_future().add_done_callback(end)
    assert done.wait(20)
    assert not dist.is_initialized()
    dist.init_process_group("bagua")


def test_a_callback_destroys_the_group(pool2):
    run(pool2, destroyed_within)


def waiting_for_others(rank, world_size):
    """Callbacks wait for the futures of later operations and for callbacks of these, and start operations meanwhile.

    Each is added where its operation is started. One rank asks for the futures before the operations have ended, the
    other perhaps after that.
    """
    ranks = range(world_size)
    for turn in range(4):
        dist.barrier()
        if turn % 2 == rank:
            time.sleep(0.03)
        futures, last, order, are_started = [], [], [], threading.Event()

        def reduce(y, factor, order=order):
            order.append(factor)
            y = y * factor * (rank + 1)
            dist.all_reduce(y)
            return y

        def first(_future, futures=futures, reduce=reduce, are_started=are_started):
            assert are_started.wait(20)
            y = reduce(futures[2].wait()[0], 2)
            return y + futures[1].then(lambda g: reduce(g.value()[0], 3)).wait() + reduce(y, 5)

        for i in range(3):
            work = dist.all_reduce(values(rank, world_size, 20) + turn + i, async_op=True)
            if turn < 2 and turn % 2 == rank:
                work.wait()
            futures.append(work.get_future())
            last.append(futures[i].then(first if i == 0 else (lambda f, reduce=reduce: reduce(f.value()[0], 7))))
        are_started.set()
        in_c = torch.futures.collect_all(futures[:1]).then(lambda _, futures=futures: futures[1].wait()[0].clone())
        sums = [sum(values(r, world_size, 20) + turn + i for r in ranks) for i in range(3)]
        scale = sum(r + 1 for r in ranks)
        y = 2 * scale * sums[2]
        expected = [y + 3 * scale * sums[1] + 5 * scale * y, 7 * scale * sums[1], 7 * scale * sums[2]]
        for future, value in zip(last, expected, strict=True):
            assert torch.equal(future.wait(), value)
        assert order == [2, 3, 5, 7, 7] and torch.equal(in_c.wait(), sums[1])


def test_a_callback_waits_for_the_futures_of_other_operations(pool2):
    run(pool2, waiting_for_others, timeout=20)


def waited_for(rank, world_size):
    """After wait() a future has its value, even while a callback holds up the level's thread; callbacks keep turns."""
    has_begun, go, order = threading.Event(), threading.Event(), []
    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    behind = [first.then(lambda _: (has_begun.set(), go.wait(20), order.append(0)))]
    assert has_begun.wait(20)
    xs = [values(rank, world_size, 9) + i for i in range(3)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    asked = [work.get_future() for work in works[:2]]
    behind += [future.then(lambda _, i=i: order.append(i)) for i, future in enumerate(asked, 1)]
    collected = torch.futures.collect_all(asked)
    for work in works:
        assert work.wait(timedelta(seconds=20))
    for future, x in zip([*asked, works[2].get_future()], xs, strict=True):
        assert future.done() and future.value()[0] is x
    assert collected.done() and not any(future.done() for future in behind) and not order
    for i, x in enumerate(xs):
        assert torch.equal(x, sum(values(r, world_size, 9) + i for r in range(world_size)))
    go.set()
    torch.futures.wait_all(behind)
    assert order == [0, 1, 2]


def test_after_wait_a_future_has_its_value(pool2):
    run(pool2, waited_for, timeout=20)


def waiting_crosswise(rank, world_size):
    """Callbacks of two groups wait for one another's futures."""
    groups = [dist.new_group(), dist.new_group()]
    both = threading.Barrier(2)
    futures = [
        [dist.all_reduce(torch.full((9,), 1.0 + i), group=group, async_op=True).get_future() for i in range(2)]
        for group in groups
    ]
    ends = [
        mine[0].then(lambda _, other=other: (both.wait(10), other[1].wait()[0])[1])
        for mine, other in zip(futures, futures[::-1], strict=True)
    ]
    assert all(torch.equal(end.wait(), torch.full((9,), 2.0 * world_size)) for end in ends)


def test_callbacks_of_two_groups_wait_for_one_another(pool2):
    run(pool2, waiting_crosswise, timeout=20)


def held_up(rank, world_size):
    """A callback that does not end is left behind at the group's timeout, and no wait under a profiler goes past it."""
    limit_s = 0.5
    group = dist.new_group()
    gate, has_begun = threading.Event(), threading.Event()
    dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().add_done_callback(
        lambda _: (has_begun.set(), gate.wait(20))
    )
    assert has_begun.wait(20)
    with profiler.profile():
        works = [dist.barrier(group, async_op=True) for _ in range(2)]
        group.set_timeout(timedelta(seconds=limit_s))
        asked = 0.0
        is_completed = False
        while not is_completed:
            begin = time.monotonic()
            is_completed = works[1].is_completed()
            asked = max(asked, time.monotonic() - begin)
        begin = time.monotonic()
        works[0].wait()
        waited = time.monotonic() - begin
    begin = time.monotonic()
    dist.destroy_process_group(group)
    destroyed = time.monotonic() - begin
    gate.set()
    assert asked < limit_s and waited < 2 * limit_s and destroyed < 2 * limit_s, (asked, waited, destroyed)


@pytest.mark.timed
def test_a_callback_that_does_not_end_holds_nothing_up_for_long(pool2):
    run(pool2, held_up)


def ends_with_callbacks(rank, world_size):
    """A program that ends waits once for callbacks of all groups that do not end, not once for each group."""
    limit_s = 0.5
    gate = threading.Event()
    begun = []
    for group in (None, *(dist.new_group() for _ in range(4))):
        has_begun = threading.Event()
        dist.barrier(group, async_op=True).get_future().add_done_callback(
            lambda _, has_begun=has_begun: (has_begun.set(), gate.wait(60))
        )
        begun.append(has_begun)
    assert all(each.wait(20) for each in begun)
    usual, lifecycle._LAST_CALLBACKS_S = lifecycle._LAST_CALLBACKS_S, limit_s
    begin = time.monotonic()
    lifecycle._close_all()
    spent = time.monotonic() - begin
    lifecycle._LAST_CALLBACKS_S = usual
    gate.set()
    assert limit_s <= spent < (len(begun) - 1) * limit_s, spent


@pytest.mark.timed
def test_callbacks_that_do_not_end_when_the_program_does(pool2):
    run(pool2, ends_with_callbacks)
